"""
How long a forward pass takes on a GPU, calculated from a data sheet (sheets.json).

    arithmetic = operations of (rows + 85 of a tile) / (share x peak)
    reading    = bytes / (0.85 x bandwidth)
    seconds    = sqrt(arithmetic^2 + reading^2) + engine + all-reduces

A GPU overlaps reading and arithmetic, but never all of it: the root lies between the larger of the
two and their sum. For 3 ms and 4 ms it says 5. A matrix is computed in tiles of many rows, so a
pass over few rows computes most of a tile in vain: of its peak it reaches share x rows / (rows +
85). `share` belongs to a generation of GPUs, 0.58 for Hopper (its clocks fall under full load) and
0.71 for the others. An engine has its time between two passes, and one for each token it samples.

These constants were chosen on one half of the published runs and tested on the other:
lab/simulate/published.py.
"""
import json
import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

SHEETS = json.loads(Path(__file__).with_name("sheets.json").read_text(encoding="utf-8"))
BANDWIDTH_SHARE, LINK_SHARE, TILE = 0.85, 0.45, 85   # TILE: in rows
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
GiB = 2**30
ENGINES = SHEETS["engines"]   # {name: {"overhead", "per_request"}}, for dataclasses.replace(gpu)


@dataclass(frozen=True)
class GPU:
    """A data sheet: operations/s in 16 and 32 bits, bytes/s, bytes, and its link to other GPUs."""
    peak: float
    peak32: float
    bandwidth: float
    memory: float
    link: float = 12e9         # bytes/s each way; the default is PCIe
    link_latency: float = 30e-6
    share: float = 0.71        # of the peak, in a pass of many rows
    overhead: float = ENGINES["tensorrt-llm"]["overhead"]         # seconds between two passes
    per_request: float = ENGINES["tensorrt-llm"]["per_request"]   # and for each sampled token


# peaks of dense matrices with 32-bit accumulation; sheets.json has the memory in GiB
GPUS = {name: GPU(**{**sheet, "memory": sheet["memory"] * GiB})
        for name, sheet in SHEETS["gpus"].items()}


@dataclass(frozen=True)
class Shape:
    """
    What a model's time and memory depend on, in the order of sheets.json. ffn_matrices: 2, or 3 if
    gated. `tp` tensor parallel ranks split heads and FFN, as beyond/tensor_parallel.py does, and
    each holds the vocabulary.
    """
    n_layer: int
    n_embd: int
    n_head: int
    n_kv_head: int
    head_size: int
    ffn: int
    ffn_matrices: int
    vocab_size: int
    block_size: int
    tied: bool = False
    size: int = 2   # bytes per number
    tp: int = 1

    def __post_init__(self):
        for name in ("n_head", "n_kv_head", "ffn"):
            if getattr(self, name) % self.tp:
                raise ValueError(f"--tp {self.tp} does not divide {name} {getattr(self, name)}")

    # of one rank; cached, because every pass asks for them

    @cached_property
    def linears(self):   # weights of the blocks
        attention = 2 * self.n_embd * self.head_size * (self.n_head + self.n_kv_head)
        layer = attention + self.ffn_matrices * self.n_embd * self.ffn
        return self.n_layer * layer // self.tp

    @cached_property
    def vocabulary(self):   # weights of the last projection
        return self.n_embd * self.vocab_size

    @cached_property
    def kv_bytes(self):   # keys and values of a token
        return 2 * self.n_layer * self.n_kv_head * self.head_size * self.size // self.tp

    def seconds(self, gpu, slots, sampled, scores, keys, copied=0):
        """
        Of a pass over `slots` places, after which the engine samples so many tokens. Scores, keys
        and copied bytes: what a layout counts. A copy is a read and a write. A ring's all-reduce
        sends 2 (tp - 1) / tp times the tensor, twice a layer.
        """
        width = self.n_layer * self.n_head * self.head_size // self.tp   # features of its heads
        rows = slots + TILE   # those of a tile are computed in vain
        operations = 2 * rows * self.linears + 2 * sampled * self.vocabulary + 4 * width * scores
        weights = self.linears + (self.vocabulary if sampled else 0)
        moved = weights * self.size + (keys + slots) * self.kv_bytes + 2 * copied
        peak = gpu.share * (gpu.peak if self.size == 2 else gpu.peak32)
        total = math.hypot(operations / peak, moved / (BANDWIDTH_SHARE * gpu.bandwidth))
        total += gpu.overhead + gpu.per_request * sampled
        if self.tp > 1:
            sent = 2 * (self.tp - 1) / self.tp * slots * self.n_embd * self.size
            total += 2 * self.n_layer * (gpu.link_latency + sent / (LINK_SHARE * gpu.link))
        return total

    def room(self, gpu):
        """Tokens whose keys and values fit: 90% of the memory, less weights and half a GB."""
        weights = (self.linears + self.vocabulary * (1 if self.tied else 2)) * self.size
        room = int((0.9 * gpu.memory - weights - 0.5e9) // self.kv_bytes)
        if room < 1:
            raise ValueError(f"the weights take {weights / GiB:.1f} GiB of each GPU's memory, "
                             f"which has {gpu.memory / GiB:.1f} GiB")
        return room


MODELS = {name: Shape(*sizes) for name, sizes in SHEETS["models"].items()}


def gpu_of(text):
    """A GPU by name, or from PEAK_TFLOPS,GB_PER_S,GiB. ValueError for anything else."""
    if text in GPUS:
        return GPUS[text]
    try:
        peak, bandwidth, memory = map(float, text.split(","))
    except ValueError:
        raise ValueError(f"--gpu {text}: not PEAK_TFLOPS,GB_PER_S,GiB and none of "
                         f"{', '.join(GPUS)}") from None
    if not all(0 < number < 1e9 for number in (peak, bandwidth, memory)):
        raise ValueError(f"--gpu {text}: the three numbers must be above 0 and below 1e9")
    return GPU(peak * 1e12, peak * 1e12, bandwidth * 1e9, memory * GiB)


def shape_of(name, dtype="float16", tp=1):
    """A Shape by name. ValueError for a model that is not in sheets.json."""
    if name not in MODELS:
        raise ValueError(f"--model {name}: none of {', '.join(MODELS)}; for another one, add a "
                         "line to lab/simulate/sheets.json")
    return replace(MODELS[name], size=BYTES[dtype], tp=tp)
