"""
All stages by name, for code that runs more than one of them. A new stage is named here; the tests
then say where else it is missing (CONTRIBUTING.md lists these places).
"""
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

SCRIPTS = {   # in the order of the path
    "unbatched": generate_unbatched.generate,
    "naive": generate_naive.generate,
    "dynamic": generate_dynamic.generate,
    "chunked": generate_chunked.generate,
    "interleaved": generate_interleaved.generate,
    "ragged": generate_ragged.generate,
    "paged": generate_paged.generate,
    "prefix": generate_prefix.generate}

VARIANTS = {   # of a stage: the ways to run it, and what comes after it
    "unbatched": {
        "unbatched, no cache": partial(generate_unbatched.generate, use_cache=False),
        "unbatched": generate_unbatched.generate},
    "interleaved": {
        "interleaved": generate_interleaved.generate,
        "prepacked": prepacked.generate,
        "prepacked, dataset": partial(prepacked.generate, pack="dataset")},
    "ragged": {
        "ragged, mask": partial(generate_ragged.generate, attention="mask"),
        "ragged, varlen": generate_ragged.generate}}

STAGES = {}   # the same, with their variants in place of some
for name, generate in SCRIPTS.items():
    STAGES |= VARIANTS.get(name, {name: generate})
