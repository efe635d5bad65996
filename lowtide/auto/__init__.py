"""``backend="auto"``: the first steps are measured, and from then on the quickest schedule within a budget runs."""
