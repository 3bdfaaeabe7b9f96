"""
Random pools of pages, as plain data: right ones, and ones in which one thing is wrong.

A pool is a dict: tables (the block tables in use), free_queue, ref_count, cached as [[hash, its
pages], ...] and hash_of as [[page, its hash], ...]. set5/calls.py makes a PrefixPool of it.
"""
SIZES = (   # pages, random moves
    (1, 0), (2, 1), (2, 2), (3, 2), (3, 4), (4, 4), (5, 6), (6, 8), (8, 12), (12, 20), (30, 40))


def pools_of_pages(rng):
    """Three pools of each size, the smallest first."""
    pools = []
    for number, moves in SIZES:
        for _ in range(3):
            pools.append(pool_of_pages(rng, number, moves))
    return pools


def pool_of_pages(rng, number, moves):
    """A pool of `number` pages after so many random moves."""
    tables, free, hashes = [], list(range(number)), {}
    for move in range(moves):
        if tables and rng.random() < 0.4:
            free_a_table(rng, tables, free, hashes)
        elif hashes and rng.random() < 0.15:
            del hashes[rng.choice(list(hashes))]   # forgotten, wherever it is
        else:
            begin_a_table(rng, tables, free, hashes, move)
    if rng.random() < 0.7:   # else some requests are admitted and have no page yet
        tables = [table for table in tables if table]
    return as_data(number, tables, free, hashes)


def free_a_table(rng, tables, free, hashes):
    table = tables.pop(rng.randrange(len(tables)))
    for page in reversed(table):
        if any(page in other for other in tables):
            continue
        if page in hashes:
            free.append(page)
        else:
            free.insert(0, page)


def begin_a_table(rng, tables, free, hashes, move):
    """A new table has up to two pages that are cached, and up to three new ones."""
    shared = [page for page in hashes if rng.random() < 0.4][:2]
    for page in shared:
        if page in free:
            free.remove(page)
    many = rng.randint(0, 3)
    taken = free[:many]
    del free[:many]
    for page in taken:
        hashes.pop(page, None)
    for page in taken:
        if rng.random() < 0.6:
            hashes[page] = hash_for(rng, f"h{move}.{page}", hashes)
    tables.append(shared + taken)


def hash_for(rng, new, hashes):
    """A new hash, or now and then that of a page which holds the same tokens."""
    if hashes and rng.random() < 0.25:
        return next(iter(hashes.values()))
    return new


def as_data(number, tables, free, hashes):
    cached = {}
    for page, name in hashes.items():
        cached.setdefault(name, []).append(page)
    return {"tables": tables, "free_queue": free,
            "ref_count": [sum(page in table for table in tables) for page in range(number)],
            "cached": [[name, pages] for name, pages in cached.items()],
            "hash_of": [[page, name] for page, name in hashes.items()]}


# --- pools to be audited --------------------------------------------------------------------------

def pools_to_audit(rng, ways):
    """
    Right pools, and pools that are wrong in one of these ways, the smallest first. Each is drawn
    anew: if a wrong pool came with the right one that it was made of, an auditor that compares the
    two would know it.
    """
    pools = []
    for number, moves in SIZES:
        of_this_size = []
        for _ in range(3):
            of_this_size.append(pool_of_pages(rng, number, moves))
            of_this_size.append(in_another_order(pool_of_pages(rng, number, moves)))
            of_this_size += wrong_pools(rng, ways, number, moves)
        rng.shuffle(of_this_size)
        pools += of_this_size
    return pools


def in_another_order(pool):
    """The free queue and hash_of the other way round, which is as right."""
    return {**pool, "free_queue": pool["free_queue"][::-1], "hash_of": pool["hash_of"][::-1]}


def wrong_pools(rng, ways, number, moves):
    """A pool for each way, as far as pools of this size can be wrong in it."""
    pools = []
    for way in ways:
        for _ in range(20):
            pool = way(rng, pool_of_pages(rng, number, moves))
            if pool is not None:
                pools.append(pool)
                break
    return pools


def without(entries, at):
    return entries[:at] + entries[at + 1:]


def replaced(entries, at, entry):
    return [*entries[:at], entry, *entries[at + 1:]]


def any_page(rng, pool):
    return rng.randrange(len(pool["ref_count"]))


def any_place(rng, entries):
    """An index of a list; None if it is empty."""
    return rng.randrange(len(entries)) if entries else None


# Of part f. Each function returns a pool, or None where this one cannot be wrong in its way.

def counted_by(rng, pool, difference):
    counts = pool["ref_count"]
    page = any_page(rng, pool)
    return {**pool, "ref_count": replaced(counts, page, counts[page] + difference)}


def counted_once_more(rng, pool):
    return counted_by(rng, pool, 1)


def counted_twice_more(rng, pool):
    return counted_by(rng, pool, 2)


def counted_once_less(rng, pool):
    return counted_by(rng, pool, -1)


def counted_for_another(rng, pool):
    """The sum of the counts is right."""
    counts = list(pool["ref_count"])
    if len(counts) < 2:
        return None
    more, less = rng.sample(range(len(counts)), 2)
    counts[more] += 1
    counts[less] -= 1
    return {**pool, "ref_count": counts}


def lost_page(rng, pool):
    at = any_place(rng, pool["free_queue"])
    if at is None:
        return None
    return {**pool, "free_queue": without(pool["free_queue"], at)}


def free_and_in_use(rng, pool):
    used = pages_in_use(pool)
    if not used:
        return None
    at = rng.randint(0, len(pool["free_queue"]))
    free = [*pool["free_queue"][:at], rng.choice(used), *pool["free_queue"][at:]]
    return {**pool, "free_queue": free}


def another_page_free(rng, pool):
    """The number of free pages is right."""
    at, used = any_place(rng, pool["free_queue"]), pages_in_use(pool)
    if at is None or not used:
        return None
    return {**pool, "free_queue": replaced(pool["free_queue"], at, rng.choice(used))}


def table_missing(rng, pool):
    at = any_place(rng, pool["tables"])
    if at is None or not pool["tables"][at]:
        return None
    return {**pool, "tables": without(pool["tables"], at)}


def table_too_many(rng, pool):
    return {**pool, "tables": [*pool["tables"], [any_page(rng, pool)]]}


def pages_in_use(pool):
    return [page for page, count in enumerate(pool["ref_count"]) if count]


OF_COUNTS_AND_QUEUE = (
    counted_once_more, counted_once_less, counted_twice_more, counted_for_another, lost_page,
    free_and_in_use, another_page_free, table_missing, table_too_many)


# Of part g.

def new_hash(rng):
    """A hash of the same form as the others: its form says nothing."""
    return f"h{rng.randrange(40)}.{rng.randrange(40)}"


def cached_under_one_more(rng, pool):
    return {**pool, "cached": [*pool["cached"], [new_hash(rng), [any_page(rng, pool)]]]}


def hash_without_a_page(rng, pool):
    return {**pool, "cached": [*pool["cached"], [new_hash(rng), []]]}


def page_with_a_new_hash(rng, pool):
    """The page may have a hash already."""
    entry = [any_page(rng, pool), new_hash(rng)]
    return {**pool, "hash_of": [*pool["hash_of"], entry]}


def hash_missing(rng, pool):
    at = any_place(rng, pool["cached"])
    if at is None:
        return None
    return {**pool, "cached": without(pool["cached"], at)}


def with_pages(rng, pool, change):
    """change(pages, another page) becomes of the pages of one hash."""
    at = any_place(rng, pool["cached"])
    if at is None:
        return None
    name, pages = pool["cached"][at]
    other, _ = rng.choice(pool["hash_of"])
    changed = change(pages, other)
    if set(changed) == set(pages):
        return None
    return {**pool, "cached": replaced(pool["cached"], at, [name, changed])}


def page_missing(rng, pool):
    return with_pages(rng, pool, lambda pages, other: pages[:-1])


def page_too_many(rng, pool):
    return with_pages(rng, pool, lambda pages, other: [*pages, other])


def page_of_another_hash(rng, pool):
    return with_pages(rng, pool, lambda pages, other: [*pages[:-1], other])


def page_under_two_hashes(rng, pool):
    if not pool["hash_of"]:
        return None
    page, _ = rng.choice(pool["hash_of"])
    return {**pool, "cached": [*pool["cached"], [new_hash(rng), [page]]]}


def way_back_missing(rng, pool):
    at = any_place(rng, pool["hash_of"])
    if at is None:
        return None
    return {**pool, "hash_of": without(pool["hash_of"], at)}


def way_back_to_another(rng, pool):
    at = any_place(rng, pool["hash_of"])
    if at is None:
        return None
    page, _ = pool["hash_of"][at]
    return {**pool, "hash_of": replaced(pool["hash_of"], at, [page, new_hash(rng)])}


def ways_back_exchanged(rng, pool):
    """The same pages and the same hashes, each page with the hash of the next."""
    pages = [page for page, _ in pool["hash_of"]]
    names = [name for _, name in pool["hash_of"]]
    if len({*names}) < 2:
        return None
    moved = names[1:] + names[:1]
    return {**pool, "hash_of": [list(pair) for pair in zip(pages, moved)]}


OF_THE_CACHE = (
    cached_under_one_more, hash_without_a_page, page_with_a_new_hash, hash_missing, page_missing,
    page_too_many, page_of_another_hash, page_under_two_hashes, way_back_missing,
    way_back_to_another, ways_back_exchanged)
