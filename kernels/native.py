"""
Builds, loads and calls native.cpp: a whole forward pass of a flat stream in one call, in float32 on
a CPU. That needs g++, and results that agree with torch's.

The compiler is called once, for two seconds, and what it builds stays in kernels/build/, as does
the reason if it fails. The library has no threads of its own but uses those of torch's OpenMP: two
sets of threads on the same cores would slow each other down.
"""
import ctypes
import hashlib
import mmap
import os
import subprocess
import sys
import tempfile
from functools import cache
from itertools import chain
from pathlib import Path
from threading import RLock

import torch
from torch.nn import functional as F

PARTS = "blocks' multiplications", "attention", "norms", "vocabulary"
SECONDS = (ctypes.c_double * len(PARTS))()   # what all steps so far have spent on each
LOCK = RLock()   # one step at a time: they share working memory, clocks and the processor's cores

SOURCE = Path(__file__).with_name("native.cpp")
COMPILER = os.environ.get("CXX") or "g++"
FLAGS = ["-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp",
         "-fno-math-errno", "-fno-trapping-math",   # these let exp() become vector instructions
         "-ffp-contract=off",                       # every rounding as it is written
         "-fno-split-loops"]                        # in two halves, `tile` would spill its sums
FLOAT = dict(dtype=torch.float32, device="cpu")   # said everywhere: programs may set other defaults
INSTALL = {"linux": "apt install g++", "darwin": "brew install gcc, then CXX=g++-15"}


# --- building and loading -------------------------------------------------------------------------

@cache
def problem():
    """Why native.cpp cannot be used here, in a line. None: it can be."""
    with LOCK:
        try:
            library()
        except FileNotFoundError:
            install = INSTALL.get(sys.platform)
            found = f"there is no {COMPILER}" + (f" ({install})" if install else "")
        except (OSError, subprocess.SubprocessError, RuntimeError) as error:
            found = f"{COMPILER} cannot build native.cpp: {error}"
        else:
            found = None if agrees() else "native.cpp computes something else than torch"
    if found:
        found = " ".join(found.split())   # a compiler says more than a line
    return found


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
        return subprocess.run([*COMPILER.split(), *arguments], capture_output=True, timeout=120)

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

    # A model with something of everything: its first layer is GPT-2's, its second one Qwen3's
    C, H, V, size, prompts = 20, 70, 50, 6, (range(37), range(40, 45))
    shapes = {"attn.query": (4 * size, C), "attn.key": (2 * size, C), "attn.value": (2 * size, C),
              "attn.c_proj": (C, 4 * size), "mlp.c_gate": (H, C), "mlp.c_fc": (H, C),
              "mlp.c_proj": (C, H), "attn.q_norm": (size,), "attn.k_norm": (size,)}
    sizes = {"wte.weight": (V, C), "wpe.weight": (40, C), "ln_f.weight": (C,), "ln_f.bias": (C,)}
    for name in Weights.BLOCK:
        shape = shapes.get(name, (C,))
        sizes[f"h.1.{name}.weight"] = shape
        if name not in ("attn.q_norm", "attn.k_norm", "mlp.c_gate"):
            sizes |= {f"h.0.{name}.weight": shape, f"h.0.{name}.bias": shape[:1]}
    named, frequencies = {name: normal(*size) for name, size in sizes.items()}, (1.0, 0.3, 0.1)

    def plainly(prompt):
        """The logits of its last token, without a line of model.py, which may be changed."""
        def norm(x, name):
            weight, bias = named[f"{name}.weight"], named.get(f"{name}.bias")
            return (F.rms_norm(x, weight.shape, weight, 1e-5) if bias is None
                    else F.layer_norm(x, weight.shape, weight, bias))

        def linear(x, name):
            return F.linear(x, named[f"{name}.weight"], named.get(f"{name}.bias"))

        def turn(x):
            places = torch.arange(len(prompt), **FLOAT)
            angles = torch.outer(places, torch.tensor(frequencies, **FLOAT))
            z = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
            return torch.cat([z.real, z.imag], -1)

        x = named["wte.weight"][prompt.start:prompt.stop] + named["wpe.weight"][:len(prompt)]
        for block in "h.0.", "h.1.":
            y = norm(x, block + "ln_1")
            q, k, v = (linear(y, f"{block}attn.{part}").unflatten(-1, (-1, size)).transpose(0, 1)
                       for part in ("query", "key", "value"))
            if block == "h.1.":
                q, k = norm(q, "h.1.attn.q_norm"), norm(k, "h.1.attn.k_norm")
            y = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True, enable_gqa=True)
            x = x + linear(y.transpose(0, 1).flatten(1), block + "attn.c_proj")
            y = norm(x, block + "ln_2")
            y = (F.gelu(linear(y, "h.0.mlp.c_fc"), approximate="tanh") if block == "h.0."
                 else F.silu(linear(y, "h.1.mlp.c_gate")) * linear(y, "h.1.mlp.c_fc"))
            x = x + linear(y, block + "mlp.c_proj")
        return norm(x, "ln_f")[-1] @ named["wte.weight"].T

    caches = torch.full((2, 2, 2, 80, size), torch.nan, **FLOAT)   # keys, values; layers; heads
    weights = Weights(named, size, frequencies=frequencies)
    a, b = (numbers(layer.data_ptr() for layer in part) for part in caches)
    # Chunks without and with a past, few tokens and many; a decode; pages of 20 tokens, scattered
    for starts, ends in ((0, 0), (20, 4)), ((20, 4), (36, 5)), ((36,), (37,)):
        places = [range(*part) for part in zip(starts, ends)]
        tokens = [p[i] for p, part in zip(prompts, places) for i in part]
        stream = torch.tensor([tokens, [i for part in places for i in part]], device="cpu")
        firsts = (0, len(places[0]))
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


def keep_memory():
    """
    Has glibc keep what it got from the system: it would give large temporaries back, and the system
    clears the memory of each new one. That is a quarter of stage 1's time at GPT-2's size. Threads
    that began before this have heaps of their own, which cannot hold large ones.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt:   # never trim; no mappings of their own; one heap for all threads
        for parameter, value in (-1, -1), (-4, 0), (-8, 1):
            mallopt(parameter, value)


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


class Weights:
    """
    Copies of a model's weights, the matrices packed, where `struct Model` and `struct Layer` look
    for them, and working memory for its steps. ValueError for weights of other shapes.

    named:       as GPT.named_parameters or Llama.named_parameters
    eps:         of its norms
    frequencies: of rotary positions, one for each pair of features; () if the model has none
    """
    BLOCK = ("ln_1", "attn.query", "attn.key", "attn.value", "attn.c_proj", "attn.q_norm",
             "attn.k_norm", "ln_2", "mlp.c_gate", "mlp.c_fc", "mlp.c_proj")

    def __init__(self, named, head_size, eps=1e-5, frequencies=()):
        self.vocabulary, C = named["wte.weight"].shape
        Q, K, H = (len(named[f"h.0.{name}.weight"])
                   for name in ("attn.query", "attn.key", "mlp.c_fc"))
        # Where positions only turn, there is no last one
        self.positions = len(named["wpe.weight"]) if "wpe.weight" in named else 2**31
        layers = 1 + max(int(name.split(".")[1]) for name in named if name.startswith("h."))
        if frequencies and 2 * len(frequencies) != head_size:
            raise ValueError(f"{len(frequencies)} frequencies for heads of {head_size}")
        self.alive = []   # what the addresses belong to

        def keep(tensor, shape, name):
            self.alive.append(tensor)
            return address(tensor, torch.float32, shape, name)

        def part(name, *shape):   # 0, a null pointer: it has none
            return keep(named[name].detach().clone(), shape, name) if name in named else 0

        def norm(name, size=C):
            return part(f"{name}.weight", size), part(f"{name}.bias", size)

        def matrix(name, n, k):
            weight = f"{name}.weight"
            if weight not in named:
                return 0, 0
            w = named[weight]
            if (w.shape, w.dtype, w.device.type) != ((n, k), torch.float32, "cpu"):
                raise ValueError(f"{weight} is {w.dtype} {tuple(w.shape)} on {w.device}, "
                                 f"not torch.float32 {(n, k)} on the CPU")
            return keep(pack(w.detach()), packed_shape(n, k), weight), part(f"{name}.bias", n)

        shapes = {"attn.query": (Q, C), "attn.key": (K, C), "attn.value": (K, C),
                  "attn.c_proj": (C, Q), "mlp.c_gate": (H, C), "mlp.c_fc": (H, C),
                  "mlp.c_proj": (C, H)}
        self.layers = numbers(chain.from_iterable(
            matrix(f"h.{i}.{name}", *shapes[name]) if name in shapes
            else norm(f"h.{i}.{name}", C if "ln_" in name else head_size)
            for i in range(layers) for name in self.BLOCK))
        self.model = numbers([
            layers, Q // head_size, Q // K, head_size, C, H, self.vocabulary, self.positions,
            part("wte.weight", self.vocabulary, C), part("wpe.weight", self.positions, C),
            *(keep(torch.tensor(each, **FLOAT), (len(each),), "a constant") if each else 0
              for each in (frequencies, [eps])),
            *norm("ln_f"),
            *matrix("lm_head" if "lm_head.weight" in named else "wte", self.vocabulary, C)])
        self.per_token = C + max(C, Q) + Q + 2 * K + 2 * H + head_size
        self.room = torch.empty(0, **FLOAT)


def step(weights, tokens, positions, pieces, page):
    """
    A whole forward pass in one call, made under LOCK. tokens, positions: long (N,). Returns the
    logits (R, V) of the tokens that each piece wants them of. IndexError, as torch's, for a
    token or a position that the model does not have.

    pieces: for each request (its first token in the stream, their number, position of the first,
            of how many, the last ones, the logits are wanted, block table, addresses of its keys
            in each layer, of its values, slots there). A block table lists the slots at which pages
            begin.
    page:   tokens in a page
    """
    N = len(tokens)
    stream = (address(tokens, torch.int64, (N,), "tokens"),
              address(positions, torch.int64, (N,), "positions"))
    tables = numbers(slot for piece in pieces for slot in piece[4])
    table, lines = ctypes.addressof(tables), []
    for first, n, start, wanted, slots, keys, values, room in pieces:
        lines += [first, n, start, wanted, table, ctypes.addressof(keys), ctypes.addressof(values),
                  room]
        table += 8 * len(slots)
    shape = sum(piece[3] for piece in pieces), weights.vocabulary
    logits = torch.empty(shape, **FLOAT)
    if len(weights.room) < weights.per_token * N:
        weights.room = torch.empty(weights.per_token * N, **FLOAT)
    done = library().step(
        weights.model, weights.layers, *stream, N, numbers(lines), len(pieces), page,
        address(weights.room, torch.float32, weights.room.shape),
        address(logits, torch.float32, shape), torch.get_num_threads(), SECONDS)
    if done < N:
        raise IndexError(f"token id {tokens[done]} at position {positions[done]}: the model has "
                         f"{weights.vocabulary} tokens and {weights.positions} positions")
    return logits
