"""Set 7: runs the auditor on a pool, and returns whether it says that something is wrong."""
import copy
from collections import OrderedDict
from types import SimpleNamespace

from audit import audit as written


def audit(tables, free_queue, ref_count, cached, hash_of):
    pool = SimpleNamespace(
        number=len(ref_count), page_size=2, ref_count=ref_count,
        cached={name: dict.fromkeys(pages) for name, pages in cached},
        hash_of=dict(hash_of), free_queue=OrderedDict.fromkeys(free_queue))
    before = copy.deepcopy((vars(pool), tables))
    said = written(pool, tables)
    if said is None or before != (vars(pool), tables):
        return said if said is None else "it changes the pool or the tables"
    return "something is wrong" if list(said) else "all is right"
