"""An auditor for the books of a pool of pages (paging.py)."""


def audit(pages, tables):
    """
    What is wrong with the books of `pages`, a Pages, given all block tables in use.

    tables: lists of page numbers. Returns a list of sentences, empty if all is right. Changes
    nothing.
    """
    found, held = [], [0] * pages.number
    for table in tables:
        for page in table:
            held[page] += 1
    for page in range(pages.number):
        if pages.holders[page] != held[page]:
            found.append(f"page {page} has {pages.holders[page]} holders, in {held[page]} tables")
        if (page in pages.free) != (held[page] == 0):
            found.append(f"page {page} is {'free, but in a table' if held[page] else 'lost'}")
        if (page in pages.key_of) != (page in pages.published.values()):
            found.append(f"page {page} is published in one direction only")
    for key, page in pages.published.items():
        if pages.key_of.get(page) != key:
            found.append(f"page {page} is published under a key that is not its own")
    for table in tables:
        for i, page in enumerate(table):
            before = pages.name_of[table[i - 1]] if i else 0
            if page in pages.key_of and pages.key_of[page][0] != before:
                found.append(f"page {page} does not come after the page before it")
    return found
