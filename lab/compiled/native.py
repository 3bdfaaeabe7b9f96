"""
Builds native.cpp and packs weights for it. The first process needs two seconds of g++ for that, and
what it builds stays in build/; later ones ask g++ only what the processor is. The library has no
threads of its own but uses those of torch's OpenMP: two sets of threads on the same cores would
slow each other down.
"""
import ctypes
import hashlib
import mmap
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from threading import Lock

import torch
from torch.nn import functional as F

LOCK = Lock()   # one step at a time: they share working memory and the processor's cores

SOURCE = Path(__file__).with_name("native.cpp")
COMPILER = os.environ.get("CXX") or "g++"
FLAGS = ["-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp",
         "-fno-math-errno", "-fno-trapping-math",   # these let exp() become vector instructions
         "-ffp-contract=off",                       # every rounding as it is written
         "-fno-split-loops"]                        # in two halves, `tile` would spill its sums
FLOAT = dict(dtype=torch.float32, device="cpu")   # said everywhere: programs may set other defaults


@cache
def library():
    """The loaded library. ValueError, in a line, where it cannot be built."""
    try:
        loaded = ctypes.CDLL(str(build()))
    except FileNotFoundError:
        how = {"darwin": "brew install gcc, then set CXX=g++-15", "win32": "use WSL"}
        raise ValueError(f"there is no {COMPILER} "
                         f"({how.get(sys.platform, 'apt install g++')})") from None
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        message = " ".join(str(error).split())
        raise ValueError(f"{COMPILER} cannot build native.cpp: {message}") from None
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    loaded.panel_width.restype = number
    loaded.multiply.restype = None
    loaded.multiply.argtypes = [*[pointer] * 4, *[number] * 5]
    loaded.step.restype = number
    loaded.step.argtypes = [*[pointer] * 4, number, pointer, number, pointer, number]
    return loaded


def build():
    """The path of the shared library for this source, compiler and processor."""
    machine = compiler("-march=native", "-dM", "-E", "-x", "c++", os.devnull).stdout
    built_from = SOURCE.read_bytes() + machine + repr(FLAGS).encode()
    digest = hashlib.sha256(built_from).hexdigest()[:16]
    path = SOURCE.with_name("build") / f"native-{digest}.so"
    if path.exists():
        return path
    path.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        part = f"{folder}/native"
        # Two calls, so that no OpenMP is linked: its functions are found in what torch has loaded.
        succeed(compiler(*FLAGS, "-c", str(SOURCE), "-o", f"{part}.o"))
        succeed(compiler("-shared", f"{part}.o", "-o", f"{part}.so"))
        os.replace(f"{part}.so", path)   # in one piece: several processes may build it
    return path


def compiler(*arguments):
    return subprocess.run([*COMPILER.split(), *arguments], capture_output=True, timeout=120)


def succeed(call):
    """RuntimeError with the first line of a failed call that names an error, or else its last."""
    if call.returncode == 0:
        return
    lines = call.stderr.decode(errors="replace").splitlines() or ["no message"]
    errors = [line for line in lines if "error" in line]
    raise RuntimeError(errors[0] if errors else lines[-1])


def keep_memory():
    """
    Has glibc keep what it got from the system, which clears the memory of each new temporary: a
    quarter of the naive stage's time at GPT-2's size. It helps threads that begin afterwards.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt:   # never trim; no mappings of their own; one heap for all threads
        for parameter, value in (-1, -1), (-4, 0), (-8, 1):
            mallopt(parameter, value)


def address(tensor, dtype, shape):
    """Where a tensor's numbers are. ValueError unless it is plain, contiguous and on the CPU."""
    if (type(tensor) is not torch.Tensor or tensor.dtype is not dtype or tensor.shape != shape
            or tensor.device.type != "cpu" or not tensor.is_contiguous()):
        raise ValueError(f"it is for a contiguous {dtype} {tuple(shape)} on the CPU")
    return tensor.data_ptr()


def numbers(values):
    values = [*values]
    return (ctypes.c_int64 * len(values))(*values)


def pack(weight):
    """
    A weight (n, k) in the order in which it is read: (panels, k, columns of a panel). Linux is
    asked for pages of 2 MB: with 4 KB, finding them takes a quarter of attention's time.
    """
    (n, k), width = weight.shape, library().panel_width()
    packed = torch.empty(-(-n // width), k, width, **FLOAT)
    ask_for_large_pages(packed)
    panels = F.pad(weight, (0, 0, 0, -n % width)).view(-1, width, k)
    return packed.copy_(panels.mT)


def ask_for_large_pages(tensor):
    """Of the whole ones inside it. Before anything is written: then they are given out."""
    size = 2**21
    first = -(-tensor.data_ptr() // size) * size
    end = (tensor.data_ptr() + tensor.nbytes) // size * size
    if hasattr(mmap, "MADV_HUGEPAGE") and first < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first),
                                  mmap.MADV_HUGEPAGE)


def multiply(x, packed, n, bias=None, gelu=False):
    """x (..., k) times a packed weight (n, k), plus bias (n,), perhaps through GELU: (..., n)."""
    k, width = x.size(-1), library().panel_width()
    rows = x.reshape(-1, k).contiguous()
    y = torch.empty(*x.shape[:-1], n, **FLOAT)
    of_bias = None if bias is None else address(bias.data, torch.float32, (n,))
    library().multiply(
        address(rows, torch.float32, rows.shape),
        address(packed, torch.float32, (-(-n // width), k, width)), of_bias,
        address(y, torch.float32, y.shape), len(rows), k, n, gelu, torch.get_num_threads())
    return y


class Weights:
    """Copies of a GPT's or a Llama's weights, where native.cpp's Model and Layer look for them."""
    BLOCK = ("ln_1", "attn.query", "attn.key", "attn.value", "attn.c_proj", "attn.q_norm",
             "attn.k_norm", "ln_2", "mlp.c_gate", "mlp.c_fc", "mlp.c_proj")

    def __init__(self, model):
        named, self.alive = dict(model.named_parameters(remove_duplicate=False)), []

        def keep(tensor):   # of the shape that its config says: see refuse_others in __init__.py
            self.alive.append(tensor)
            return address(tensor, torch.float32, tensor.shape)

        def copy(name, arrange=torch.clone):   # 0, a null pointer: there is none
            return keep(arrange(named[name].detach().contiguous())) if name in named else 0

        def both(name):
            arrange = torch.clone if "ln_" in name or "_norm" in name else pack
            return copy(f"{name}.weight", arrange), copy(f"{name}.bias")

        V, C = named["wte.weight"].shape
        size = model.h[0].attn.head_size
        Q, K, H = (len(named[f"h.0.{name}.weight"])
                   for name in ("attn.query", "attn.key", "mlp.c_fc"))
        positions = len(named["wpe.weight"]) if "wpe.weight" in named else 2**31   # no last one
        self.layers, self.vocabulary = len(model.h), V
        self.heads, self.head_size = K // size, size   # of keys
        of_layers = []
        for i in range(self.layers):
            for name in self.BLOCK:
                of_layers += both(f"h.{i}.{name}")
        self.of_layers = numbers(of_layers)
        self.of_model = numbers([
            self.layers, Q // size, Q // K, size, C, H, V, positions,
            copy("wte.weight"), copy("wpe.weight"),
            keep(torch.tensor(model.frequencies, **FLOAT)) if hasattr(model, "frequencies") else 0,
            keep(torch.tensor(model.ln_f.eps, **FLOAT)), *both("ln_f"),
            *both("lm_head" if "lm_head.weight" in named else "wte")])
