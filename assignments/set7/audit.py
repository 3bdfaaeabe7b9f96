"""An auditor for the pages of a pool (generate_prefix.py)."""


def audit(pages, tables):
    """
    What is wrong with `pages`, a PrefixPages, given all block tables in use.

    tables: lists of page numbers. Returns a list of sentences, empty if all is right. Changes
    nothing.
    """
    found, used = [], [0] * pages.number
    for table in tables:
        for page in table:
            used[page] += 1
    for page in range(pages.number):
        if pages.ref_count[page] != used[page]:
            found.append(f"page {page} is counted {pages.ref_count[page]} times, and is in "
                         f"{used[page]} tables")
        if (page in pages.free_queue) != (used[page] == 0):
            found.append(f"page {page} is {'free, but in a table' if used[page] else 'lost'}")
        if (page in pages.hash_of) != (page in pages.cached.values()):
            found.append(f"page {page} is cached in one direction only")
    for name, page in pages.cached.items():
        if pages.hash_of.get(page) != name:
            found.append(f"page {page} is cached under a hash that is not its own")
    return found
