"""All stages by name, for code that runs more than one of them."""
from functools import partial

import generate_chunked
import generate_dynamic
import generate_interleaved
import generate_naive
import generate_paged
import generate_prefix
import generate_ragged
import generate_unbatched
from beyond import prepacked

SCRIPTS = {module.__name__.removeprefix("generate_"): module.generate for module in (
    generate_unbatched, generate_naive, generate_dynamic, generate_chunked, generate_interleaved,
    generate_ragged, generate_paged, generate_prefix)}
STAGES = {   # in the ladder's order, with variants, and prepacking
    "unbatched, no cache": partial(generate_unbatched.generate, use_cache=False),
    **{name: SCRIPTS[name] for name in ("unbatched", "naive", "dynamic", "chunked",
                                        "interleaved")},
    "prepacked": prepacked.generate,
    "prepacked, dataset": partial(prepacked.generate, pack="dataset"),
    "ragged, mask": partial(generate_ragged.generate, attention="mask"),
    "ragged, varlen": generate_ragged.generate,
    "paged": generate_paged.generate,
    "prefix": generate_prefix.generate,
}
