import torch

from _common import Case, off_variants

c = Case(
    57,
    "a tensor that was on the CPU when saved comes back on the accelerator",
    "meta-pytorch/torchtune#2456",
    "every saved tensor returns on its own device with its own dtype, layout and requires_grad; tensors already on the host are not copied",
)


class NeedsCpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, idx):
        ctx.save_for_backward(a, idx)
        return a * 2

    @staticmethod
    def backward(ctx, g):
        _a, idx = ctx.saved_tensors
        assert idx.device.type == "cpu" and idx.dtype == torch.int64
        return g * 2, None


dev = "cuda" if torch.cuda.is_available() else "cpu"
for name, off in off_variants("stock-save_on_cpu", "stock-copy_offload"):

    def r():
        a = torch.randn(4, device=dev, requires_grad=True)
        idx = torch.arange(4)
        with off():
            o = NeedsCpu.apply(a * 1, idx)
        o.sum().backward()
        return a.grad.device.type == dev, f"compute device {dev}"

    c.try_(name, r)
for name, off in off_variants("stock-copy_offload"):

    def r():
        a = torch.randn(4, 4, requires_grad=True)
        s = torch.eye(4).to_sparse()
        with off():
            o = torch.sparse.mm(s, a)
        o.sum().backward()
        return a.grad is not None, "sparse operand"

    c.try_(name, r)
c.end()
