"""An auditor for the pages of a pool (generate_prefix.py)."""


def audit(pool, tables):
    """
    What is wrong with `pool`, a PrefixPool, given all block tables in use.

    tables: lists of page numbers. Returns a list of sentences, empty if all is right. Changes
    nothing.
    """
    faults = []
    used = [0] * pool.number   # of each page, in how many tables it is
    for table in tables:
        for page in table:
            used[page] += 1

    for page in range(pool.number):
        if pool.ref_count[page] != used[page]:
            faults.append(f"page {page} is counted {pool.ref_count[page]} times, and is in "
                          f"{used[page]} tables")
        is_free, is_unused = page in pool.free_queue, used[page] == 0
        if is_free and not is_unused:
            faults.append(f"page {page} is free, but in a table")
        if is_unused and not is_free:
            faults.append(f"page {page} is lost")

    for page, digest in pool.hash_of.items():
        if page not in pool.cached.get(digest, ()):
            faults.append(f"page {page} is cached in one direction only")
    for digest, pages in pool.cached.items():
        if not pages:
            faults.append("there is a hash without a page")
        for page in pages:
            if pool.hash_of.get(page) != digest:
                faults.append(f"page {page} is cached under a hash that is not its own")
    return faults
