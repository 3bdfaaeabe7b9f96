"""
Builds, loads and calls native.cpp: a whole forward pass of a flat stream in one call, in float32 on
a CPU. That needs g++, and results that agree with torch's. Elsewhere everything runs through torch.

The compiler is called once, for two seconds, and what it builds stays in kernels/build/, as does
the reason if it fails. The library has no threads of its own but uses those of torch's OpenMP: two
sets of threads on the same cores would slow each other down.
"""
import ctypes
import hashlib
import math
import mmap
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from threading import RLock

import torch
from torch.nn import functional as F

from kernels.threads import threads

PARTS = "blocks' multiplications", "attention", "norms", "vocabulary"
SECONDS = (ctypes.c_double * len(PARTS))()   # what all steps so far have spent on each
LOCK = RLock()   # one step at a time: they share working memory, clocks and the processor's cores

SOURCE = Path(__file__).with_name("native.cpp")
COMPILER = os.environ.get("CXX", "g++")
FLAGS = ["-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp",
         "-fno-math-errno", "-fno-trapping-math",   # these let exp() become vector instructions
         "-ffp-contract=off",                       # every rounding as it is written: docs/bits.md
         "-fno-split-loops"]                        # in two halves, `tile` would spill its sums
FLOAT = dict(dtype=torch.float32, device="cpu")   # said everywhere: programs may set other defaults
INSTALL = {"linux": "apt install g++", "darwin": "brew install gcc, then CXX=g++-15"}


# --- building and loading -------------------------------------------------------------------------

@cache
def problem():
    """Why native.cpp cannot be used here, in a line that stderr gets, too. None: it can be."""
    with LOCK:
        try:
            library()
        except FileNotFoundError:
            install = INSTALL.get(sys.platform)
            found = f"there is no {COMPILER} here" + (f" ({install})" if install else "")
        except (OSError, subprocess.SubprocessError, RuntimeError) as error:
            found = f"{COMPILER} cannot build native.cpp: {error}"
        else:
            found = None if agrees() else "native.cpp computes something else than torch"
    if found:
        print(f"optimize(): {found}; using torch's kernels", file=sys.stderr)
    return found


def works():
    return problem() is None


@cache
def library():
    """The loaded library. OSError, SubprocessError or RuntimeError where it cannot be built."""
    loaded = ctypes.CDLL(str(build()))
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    loaded.panel_width.restype, loaded.multiply.restype, loaded.step.restype = number, None, number
    loaded.multiply.argtypes = [*[pointer] * 4, *[number] * 5]
    loaded.step.argtypes = [*[pointer] * 4, number, pointer, *[number] * 2, *[pointer] * 2, number,
                            pointer]
    return loaded


def build():
    """The path of the shared library for this source, compiler and processor."""
    def run(*arguments):
        return subprocess.run([COMPILER, *arguments], capture_output=True, timeout=120)

    machine = run("-march=native", "-dM", "-E", "-x", "c++", os.devnull).stdout
    digest = hashlib.sha256(SOURCE.read_bytes() + machine + repr(FLAGS).encode()).hexdigest()[:16]
    path = SOURCE.with_name("build") / f"native-{digest}.so"
    failed = path.with_suffix(".failed")   # what the compiler said: delete it to try again
    if path.exists():
        return path
    if failed.exists():
        raise RuntimeError(f"{failed.read_text()} (delete {failed.name} to try again)")
    path.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        part = f"{folder}/native"
        # Two calls, so that no OpenMP is linked: its functions are found in what torch has loaded.
        for arguments in ([*FLAGS, "-c", str(SOURCE), "-o", f"{part}.o"],
                          ["-shared", f"{part}.o", "-o", f"{part}.so"]):
            done = run(*arguments)
            if done.returncode:
                lines = done.stderr.decode(errors="replace").splitlines() or ["no message"]
                reason = next((line for line in lines if "error" in line), lines[-1])
                if "-fopenmp" in reason and sys.platform == "darwin":
                    reason += f" ({INSTALL['darwin']})"
                failed.write_text(reason)
                raise RuntimeError(reason)
        os.replace(f"{part}.so", path)   # in one piece: several processes may build it
    return path


@torch.no_grad()
@torch.autocast("cpu", enabled=False)
def agrees():
    """Whether the library computes what torch computes, on two small problems."""
    random = torch.Generator("cpu").manual_seed(0)

    def normal(*size):
        return torch.randn(size, generator=random, **FLOAT) / 4

    x, weight, bias = normal(11, 7), normal(60, 7), normal(60)
    found = [(multiply(x, pack(weight), 60, bias, gelu=True),
              F.gelu(F.linear(x, weight, bias), approximate="tanh"))]

    C, V, heads, prompts = 20, 50, 2, (range(37), range(40, 45))
    sizes = {"wte.weight": (V, C), "wpe.weight": (40, C), "ln_f.weight": (C,), "ln_f.bias": (C,)}
    for name in (f"h.{i}.{part}" for i in range(2) for part in Weights.BLOCK):
        k, n = (C * (4 if name.endswith("mlp." + end) else 1) for end in ("c_proj", "c_fc"))
        sizes |= {f"{name}.weight": (n,) if "ln_" in name else (n, k), f"{name}.bias": (n,)}
    named = {name: normal(*size) for name, size in sizes.items()}

    def plainly(prompt):
        """The logits of its last token, without a line of model.py, which may be changed."""
        def norm(x, name):
            return F.layer_norm(x, (C,), named[f"{name}.weight"], named[f"{name}.bias"])

        def linear(x, name):
            return F.linear(x, named[f"{name}.weight"], named[f"{name}.bias"])

        x = named["wte.weight"][prompt.start:prompt.stop] + named["wpe.weight"][:len(prompt)]
        for block in "h.0.", "h.1.":
            y = norm(x, block + "ln_1")
            q, k, v = (linear(y, f"{block}attn.{part}").unflatten(-1, (heads, -1)).transpose(0, 1)
                       for part in ("query", "key", "value"))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
            x = x + linear(y, block + "attn.c_proj")
            y = linear(norm(x, block + "ln_2"), block + "mlp.c_fc")
            x = x + linear(F.gelu(y, approximate="tanh"), block + "mlp.c_proj")
        return norm(x, "ln_f")[-1] @ named["wte.weight"].T

    pool = torch.full((2, 2, heads, 80, C // heads), torch.nan, **FLOAT)
    weights = Weights(named, C // heads, lambda name: pack(named[name]))
    # Chunks without and with a past, few tokens and many; a decode; pages of 20 tokens, scattered
    for starts, ends in ((0, 0), (20, 4)), ((20, 4), (36, 5)), ((36,), (37,)):
        places = [range(*part) for part in zip(starts, ends)]
        tokens = [p[i] for p, part in zip(prompts, places) for i in part]
        stream = torch.tensor([tokens, [i for part in places for i in part]], device="cpu")
        firsts, (a, b) = (0, len(places[0])), map(pool_address, pool)
        pieces = [(first, len(part), part.start, 1, table, a, b, 80)
                  for first, part, table in zip(firsts, places, ([0, 60], [30]))]
        logits = step(weights, *stream, pieces, 20)
        found += [(row, plainly(p[:end])) for row, p, end in zip(logits, prompts, ends)]
    return all(torch.allclose(mine, theirs, rtol=0, atol=1e-4) for mine, theirs in found)


# --- the one door for tensors ---------------------------------------------------------------------

def address(tensor, dtype, shape, name="a tensor"):
    """
    Where a tensor's numbers are: C++ gets no address that is not from here. ValueError unless it is
    a plain tensor in the memory of the CPU, contiguous, and of this dtype and shape.
    """
    if (type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.dtype is dtype
            and tensor.shape == shape and tensor.device.type == "cpu" and tensor.is_contiguous()):
        return tensor.data_ptr()
    if not torch.is_tensor(tensor):
        raise ValueError(f"{name} is a {type(tensor).__name__}, not a tensor")
    how = "" if tensor.layout is not torch.strided or tensor.is_contiguous() else "not contiguous, "
    raise ValueError(f"{name} is {how}{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, "
                     f"not {dtype} {tuple(shape)} on the CPU")


def pool_address(pool):
    """Of a pool's keys or values: (layers, heads, slots, size)."""
    return address(pool, torch.float32, pool.shape, "a pool")


def huge_pages(tensor):
    """
    Asks Linux for pages of 2 MB for a new tensor, and returns it. A step reads hundreds of
    megabytes, each once. With pages of 4 KB, finding them takes a quarter of attention's time.
    """
    size, advice = 2**21, getattr(mmap, "MADV_HUGEPAGE", None)
    first = -(-tensor.data_ptr() // size) * size
    end = (tensor.data_ptr() + tensor.nbytes) // size * size
    if advice is not None and tensor.device.type == "cpu" and first < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), advice)
    return tensor


def numbers(values):
    values = list(values)
    return (ctypes.c_int64 * len(values))(*values)


# --- calling --------------------------------------------------------------------------------------

def packed_shape(n, k):
    width = library().panel_width()
    return -(-n // width), k, width


def pack(weight):
    """A weight (n, k) in the order in which it is read: (panels, k, columns of a panel)."""
    panels, k, width = shape = packed_shape(*weight.shape)
    packed = huge_pages(torch.empty(shape, **FLOAT))
    return packed.copy_(F.pad(weight, (0, 0, 0, -len(weight) % width)).view(panels, width, k).mT)


def multiply(x, packed, n, bias=None, gelu=False):
    """x (..., k) times a packed weight (n, k), plus bias (n,), perhaps through GELU: (..., n)."""
    k = x.size(-1)
    rows, y = x.reshape(-1, k).contiguous(), torch.empty(*x.shape[:-1], n, **FLOAT)
    library().multiply(
        address(rows, torch.float32, rows.shape, "x"),
        address(packed, torch.float32, packed_shape(n, k), "the packed weight"),
        None if bias is None else address(bias, torch.float32, (n,), "the bias"),
        address(y, torch.float32, y.shape), len(rows), k, n, gelu, torch.get_num_threads())
    return y


def why_not_now(wte):
    """Why no step can run on the weights of this nn.Embedding at present; None if one can."""
    weight, reordered = wte.weight, wte.reordered
    if not reordered.compiled:
        return "optimize() was called without it"
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        return f"it is for float32 on a CPU, not {weight.dtype} on {weight.device.type}"
    return problem()


class Weights:
    """
    Where an unchanged model's weights are, as `struct Model` and `struct Layer` list them, and
    working memory for its steps. ValueError for weights of other shapes.

    named:  as GPT.named_parameters
    packed: a function of a weight's name: that weight, packed
    """
    BLOCK = ("ln_1", "attn.query", "attn.key", "attn.value", "attn.c_proj",
             "ln_2", "mlp.c_fc", "mlp.c_proj")

    def __init__(self, named, head_size, packed):
        self.vocabulary, C = named["wte.weight"].shape
        self.positions = len(named["wpe.weight"])
        layers = math.ceil((len(named) - 4) / (2 * len(self.BLOCK)))
        self.alive = [named]   # what the addresses belong to

        def part(name, *shape):
            return address(named[name], torch.float32, shape, name)

        def norm(name):
            return part(f"{name}.weight", C), part(f"{name}.bias", C)

        def matrix(name, n, k):
            if named[name].shape != (n, k):
                raise ValueError(f"{name} is {tuple(named[name].shape)}, not {(n, k)}")
            self.alive.append(packed(name))
            return address(self.alive[-1], torch.float32, packed_shape(n, k), name)

        lines = []
        for name in (f"h.{i}.{each}" for i in range(layers) for each in self.BLOCK):
            k, n = (4 * C if name.endswith("mlp." + end) else C for end in ("c_proj", "c_fc"))
            lines += norm(name) if "ln_" in name else (
                matrix(f"{name}.weight", n, k), part(f"{name}.bias", n))
        self.layers = numbers(lines)
        self.model = numbers([
            layers, C // head_size, C, 4 * C, self.vocabulary, self.positions,
            part("wte.weight", self.vocabulary, C), part("wpe.weight", self.positions, C),
            *norm("ln_f"), matrix("wte.weight", self.vocabulary, C), 0])
        self.per_token, self.room = 9 * C, torch.empty(0, **FLOAT)


def step(weights, tokens, positions, pieces, page):
    """
    A whole forward pass in one call, made under LOCK. tokens, positions: long (N,). Returns the
    logits (R, V) of the tokens that each piece wants them of. IndexError, as torch's, for a
    token or a position that the model does not have.

    pieces: for each request (its first token in the stream, their number, position of the first,
            of how many, the last ones, the logits are wanted, block table, address of the pool's
            keys, of its values, slots in the pool). A block table lists the slots at which pages
            begin.
    page:   tokens in a page
    """
    N = len(tokens)
    stream = (address(tokens, torch.int64, (N,), "tokens"),
              address(positions, torch.int64, (N,), "positions"))
    tables = numbers(slot for piece in pieces for slot in piece[4])
    table, lines = ctypes.addressof(tables), []
    for first, n, start, wanted, slots, *pool in pieces:
        lines += [first, n, start, wanted, table, *pool]
        table += 8 * len(slots)
    shape = sum(piece[3] for piece in pieces), weights.vocabulary
    logits = torch.empty(shape, **FLOAT)
    with threads.chosen() as count:
        if len(weights.room) < weights.per_token * N:
            weights.room = torch.empty(weights.per_token * N, **FLOAT)
        done = library().step(
            weights.model, weights.layers, *stream, N, numbers(lines), len(pieces), page,
            address(weights.room, torch.float32, weights.room.shape),
            address(logits, torch.float32, shape), count, SECONDS)
    if done < N:
        raise IndexError(f"token id {tokens[done]} at position {positions[done]}: the model has "
                         f"{weights.vocabulary} tokens and {weights.positions} positions")
    return logits
