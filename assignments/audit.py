"""An auditor for the pages of a pool (generate_prefix.py)."""


def audit(pool, tables):
    """
    What is wrong with `pool`, a PrefixPool, given all block tables in use.

    tables: lists of page numbers. Returns a list of sentences, empty if all is right. Changes
    nothing.
    """
    found, used = [], [0] * pool.number
    for table in tables:
        for page in table:
            used[page] += 1
    for page in range(pool.number):
        if pool.ref_count[page] != used[page]:
            found.append(f"page {page} is counted {pool.ref_count[page]} times, and is in "
                         f"{used[page]} tables")
        if (page in pool.free_queue) != (used[page] == 0):
            found.append(f"page {page} is {'free, but in a table' if used[page] else 'lost'}")
    for page, name in pool.hash_of.items():
        if page not in pool.cached.get(name, ()):
            found.append(f"page {page} is cached in one direction only")
    for name, pages in pool.cached.items():
        if not pages:
            found.append("there is a hash without a page")
        for page in pages:
            if pool.hash_of.get(page) != name:
                found.append(f"page {page} is cached under a hash that is not its own")
    return found
