"""All stages by name, for code that runs more than one of them."""
from functools import partial
from importlib import import_module

SCRIPTS = {name: import_module(f"generate_{name}").generate for name in (
    "unbatched", "naive", "dynamic", "chunked", "interleaved", "prepacked", "ragged", "paged")}
STAGES = {   # in the ladder's order, with variants
    "unbatched, no cache": partial(SCRIPTS["unbatched"], use_cache=False),
    **{name: generate for name, generate in SCRIPTS.items() if name not in ("ragged", "paged")},
    "prepacked, dataset": partial(SCRIPTS["prepacked"], pack="dataset"),
    "ragged, mask": partial(SCRIPTS["ragged"], attention="mask"),
    "ragged, varlen": SCRIPTS["ragged"],
    "paged": SCRIPTS["paged"],
}
