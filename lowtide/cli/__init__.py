"""The command line: one file a command, each parses, calls one function of a lower layer, and prints."""
