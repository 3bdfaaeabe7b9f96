"""
A device that is not the CPU, on every machine: it shows where code forgets its `device`.

    with second_device():
        q = torch.randn(2, 3).to(DEVICE)
        mask = torch.ones(3, 3, dtype=torch.bool)                     # forgotten: on the CPU
        (q @ q.T).masked_fill(mask[:2, :2], 0)                        # RuntimeError, as on a GPU

A tensor on DEVICE is a CPU tensor in a wrapper. It says that it is on "second:0", by the device
type that PyTorch keeps for other people's hardware. Every operation is caught, its arguments are
unwrapped, the CPU computes, and the result is wrapped again. So all numbers are the CPU's, and only
one thing is new: an operation on tensors of both devices is an error, unless CUDA allows it.
"""
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "second"
_setup_privateuseone_for_python_backend(NAME)
DEVICE = torch.device(NAME, 0)


class Away(torch.Tensor):
    """A tensor on the second device. cpu: the tensor that holds its numbers"""

    @staticmethod
    def __new__(cls, cpu):
        return torch.Tensor._make_wrapper_subclass(
            cls, cpu.size(), cpu.stride(), cpu.storage_offset(), dtype=cpu.dtype, device=DEVICE)

    def __init__(self, cpu):
        self.cpu_tensor = cpu

    def __repr__(self):
        return f"{self.cpu_tensor}, on {DEVICE}"

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return compute(operation, args, kwargs or {})


def is_second(device):
    """Whether this is the second device: a torch.device, or its name."""
    return torch.device(device).type == NAME


def is_there(tensor):
    """Whether this is a tensor on the second device, also inside torch.vmap."""
    return isinstance(tensor, torch.Tensor) and is_second(tensor.device)


# --- one operation --------------------------------------------------------------------------------

def compute(operation, args, kwargs):
    """Computes an operation on the CPU. Its result is where CUDA would have it."""
    values = [*values_in(args), *values_in(tuple(kwargs.values()))]
    asked = [each for each in values if isinstance(each, torch.device)]
    tensors = [each for each in values if isinstance(each, torch.Tensor)]
    here = [each for each in tensors if not isinstance(each, Away)]
    away = len(tensors) - len(here)
    if here and away:
        refuse_mixture(operation, args, here)
    cpu_kwargs = {name: changed(each, on_cpu) for name, each in kwargs.items()}
    result = operation(*changed(args, on_cpu), **cpu_kwargs)
    # Whoever asks for a device gets it: torch.zeros(3, device=...), x.to(...).
    there = is_second(asked[0]) if asked else away > 0
    if there:
        result = changed(result, on_device)
    # An operation in place, like x.add_(1) or x.unsqueeze_(0), returns its own argument.
    if operation._schema.is_mutable:
        return return_and_correct_aliasing(operation, args, kwargs, result)
    return result


def values_in(value):
    """The values in lists and tuples."""
    if not isinstance(value, (list, tuple)):
        return [value]
    values = []
    for each in value:
        values += values_in(each)
    return values


def changed(value, change):
    """The same lists and tuples, of changed values."""
    if not isinstance(value, (list, tuple)):
        return change(value)
    return type(value)(changed(each, change) for each in value)


def on_cpu(value):
    """An argument as the CPU gets it."""
    if isinstance(value, Away):
        return value.cpu_tensor
    if isinstance(value, torch.device) and is_second(value):
        return torch.device("cpu")
    return value


def on_device(value):
    """A result as the second device gives it."""
    return Away(value) if isinstance(value, torch.Tensor) else value


def refuse_mixture(operation, args, here):
    """RuntimeError, in PyTorch's words, but for what CUDA allows. here: the tensors on the CPU"""
    # A tensor without axes is a number, and numbers are on every device.
    if all(each.dim() == 0 for each in here):
        return
    name = operation._schema.name.removeprefix("aten::")
    # A copy is how data gets from one device to another.
    if name == "copy_":
        return
    # An index may be on the CPU: x[index], and x[index] = values with values on the device.
    if name in ("index", "index_put_") and isinstance(args[0], Away):
        value = args[2] if name == "index_put_" else args[0]
        if isinstance(value, Away) or value.dim() == 0:
            return
    raise RuntimeError("Expected all tensors to be on the same device, but found at least two "
                       f"devices, {DEVICE} and cpu! (in {name})")


class Operations(TorchDispatchMode):
    """Catches operations that have no tensor of the device yet, such as torch.zeros."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        return compute(operation, args, kwargs or {})


# --- what PyTorch does without an operation -------------------------------------------------------

class Calls(TorchFunctionMode):
    """Catches calls in which PyTorch reads or writes a tensor's memory without an operation."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # torch.tensor([1, 2], device=...) fills the device's memory itself. Made here, then moved.
        if function in (torch.tensor, torch.as_tensor, torch.asarray):
            device = kwargs.get("device") or torch.get_default_device()
            if is_second(device):
                return function(*args, **{**kwargs, "device": "cpu"}).to(device)
        # model.to(device) asks whether a weight can become one of the device in its place.
        if function == torch._has_compatible_shallow_copy_type:
            return False
        if not args or not is_there(args[0]):
            return function(*args, **kwargs)
        # x.new_tensor([1, 2]) does, too.
        if function == torch.Tensor.new_tensor:
            like = torch.empty(0, dtype=args[0].dtype, device="cpu")
            device = kwargs.pop("device", None) or DEVICE
            return like.new_tensor(*args[1:], **kwargs).to(device)
        # x.tolist() reads the memory, and f"{x:.3f}" takes no tensors but PyTorch's own.
        if function in (torch.Tensor.tolist, torch.Tensor.__format__):
            return function(args[0].cpu(), *args[1:])
        # x[[0, 2]] makes an index of a list, in the device's memory.
        if function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            args = args[0], index_of(args[1]), *args[2:]
        return function(*args, **kwargs)


def index_of(key):
    """An index with tensors in the place of its lists."""
    if isinstance(key, tuple):
        return tuple(index_of(each) for each in key)
    return torch.tensor(key) if isinstance(key, list) else key


@contextmanager
def second_device():
    """In the `with` block, DEVICE is a device."""
    with Calls(), Operations():
        yield
