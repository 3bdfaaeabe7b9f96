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

SCRIPTS = {
    "unbatched": generate_unbatched.generate,
    "naive": generate_naive.generate,
    "dynamic": generate_dynamic.generate,
    "chunked": generate_chunked.generate,
    "interleaved": generate_interleaved.generate,
    "prepacked": generate_prepacked.generate,
    "ragged": generate_ragged.generate,
    "paged": generate_paged.generate,
}
STAGES = {   # in the ladder's order, with variants
    "unbatched, no cache": partial(generate_unbatched.generate, use_cache=False),
    **{name: generate for name, generate in SCRIPTS.items() if name not in ("ragged", "paged")},
    "prepacked, dataset": partial(generate_prepacked.generate, pack="dataset"),
    "ragged, mask": partial(generate_ragged.generate, attention="mask"),
    "ragged, varlen": generate_ragged.generate,
    "paged": generate_paged.generate,
}
