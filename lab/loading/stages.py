"""All stages by name, for code that runs more than one of them."""
from functools import partial

import generate_chunked
import generate_dynamic
import generate_interleaved
import generate_naive
import generate_paged
import generate_prepacked
import generate_ragged
import generate_unbatched

SCRIPTS = {module.__name__.removeprefix("generate_"): module.generate for module in (
    generate_unbatched, generate_naive, generate_dynamic, generate_chunked, generate_interleaved,
    generate_prepacked, generate_ragged, generate_paged)}
STAGES = {   # in the ladder's order, with variants
    "unbatched, no cache": partial(generate_unbatched.generate, use_cache=False),
    **{name: generate for name, generate in SCRIPTS.items() if name not in ("ragged", "paged")},
    "prepacked, dataset": partial(generate_prepacked.generate, pack="dataset"),
    "ragged, mask": partial(generate_ragged.generate, attention="mask"),
    "ragged, varlen": generate_ragged.generate,
    "paged": generate_paged.generate,
}
