"""Set 7: mistakes, as edits of our source. Each must fail some case of its part."""
AUDIT = "audit.py:audit"
COUNT = "pages.ref_count[page] != used[page]"
MISTAKES = {   # part: [(sentence, function, code as it stands, code of the mistake), ...]
    "a": [
        ("as if nothing were ever wrong", AUDIT, "return found", "return []"),
        ("as if ref_count did not matter", AUDIT, COUNT, "False"),
        ("as if only a ref_count that is too small were wrong", AUDIT, COUNT,
         "pages.ref_count[page] < used[page]"),
        ("as if only a ref_count that is too large were wrong", AUDIT, COUNT,
         "pages.ref_count[page] > used[page]"),
        ("as if a page might be in one table only", AUDIT, COUNT,
         "pages.ref_count[page] != used[page] or used[page] > 1"),
        ("as if the free queue did not matter", AUDIT,
         "(page in pages.free_queue) != (used[page] == 0)", "False"),
        ("as if a page that is nowhere were no loss", AUDIT,
         "(page in pages.free_queue) != (used[page] == 0)", "page in pages.free_queue and used[page]"),
        ("as if a page might be free and in a table", AUDIT,
         "(page in pages.free_queue) != (used[page] == 0)",
         "page not in pages.free_queue and not used[page]"),
        ("as if a free page might not be cached", AUDIT, "return found",
         "return found + [page for page in pages.hash_of if page in pages.free_queue]")],
    "b": [
        ("as if nothing were ever wrong", AUDIT, "return found", "return []"),
        ("as if the prefix cache did not matter", AUDIT, "return found",
         "return [each for each in found if 'cached' not in each]"),
        ("as if pages of hash_of might be missing in cached", AUDIT,
         "(page in pages.hash_of) != (page in pages.cached.values())",
         "page in pages.cached.values() and page not in pages.hash_of"),
        ("as if equal sets of pages were enough, whatever their hashes", AUDIT,
         "pages.hash_of.get(page) != name", "False"),
        ("as if equal numbers of entries were enough", AUDIT, "",
         "return [1] if len(pages.cached) != len(pages.hash_of) else []"),
        ("as if only pages in tables might be cached", AUDIT, "return found",
         "return found + [page for page in pages.hash_of if page in pages.free_queue]"),
        ("as if every page in a table had to be cached", AUDIT, "return found",
         "return found + [1 for table in tables if not pages.hash_of.keys() >= {*table}]")],
}
