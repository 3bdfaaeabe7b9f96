"""Set 7: runs the auditor on a pool, and returns whether it says that something is wrong."""
import copy
from collections import OrderedDict
from types import SimpleNamespace

from audit import audit as written


def audit(tables, free_queue, ref_count, cached, hash_of):
    pages = SimpleNamespace(
        number=len(ref_count), size=2, ref_count=ref_count, cached=dict(cached),
        hash_of={page: name for page, name in hash_of}, free_queue=OrderedDict.fromkeys(free_queue))
    before = copy.deepcopy((vars(pages), tables))
    said = written(pages, tables)
    if said is None or before != (vars(pages), tables):
        return said if said is None else "it changes the pages or the tables"
    return "something is wrong" if list(said) else "all is right"
