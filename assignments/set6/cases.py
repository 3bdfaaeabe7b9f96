"""Set 6, guess: points and cases."""
from random_rows import lists

FILES = ("model.py request.py cache.py scheduler.py generate_ragged.py paging.py generate_paged.py "
         "generate_prefix.py beyond/speculative.py")
ESSAY = "beyond/speculative.py:"
PARTS = {   # points, what it is about, {function: its calls}
    "a": (4, "prompt lookup", {f"{ESSAY}Lookup.guess": "guess guess_often guess_for_two"}),
    "b": (3, "room for guesses", {f"{ESSAY}draft": "draft"}),
    "c": (6, "one pass, several tokens", {
        f"{ESSAY}lay_out": "generate generate_on_a_device",
        f"{ESSAY}next_round": "generate",
        f"{ESSAY}generate": "generate"})}
DECODE = {"prompt": 4, "generated": 1, "computed": 4, "n": 1}


def random_tokens(rng, kinds, number):
    return [rng.randrange(kinds) for _ in range(number)]


# --- a --------------------------------------------------------------------------------------------

SMALL = (   # prompt, generated, most
    ([5], [], 2),
    ([5, 5], [5], 2),
    ([5], [5, 5, 5], 2),
    ([1, 2], [3, 4], 4),
    ([1, 2, 3, 1, 2], [3, 1, 2, 9, 1, 2], 3),
    ([1, 2, 9, 1, 2, 8, 1], [2, 9], 1))


def lookups(rng):
    for prompt, generated, most in SMALL:
        yield {"call": "guess", "prompt": prompt, "generated": generated, "most": most}
    for kinds in 2, 2, 3, 4, 6, 9:
        prompt = random_tokens(rng, kinds, rng.randint(1, 20))
        generated = random_tokens(rng, kinds, 30)
        yield {"call": "guess", "prompt": prompt, "generated": generated,
               "most": rng.randint(1, 6), "at_once": 1 + kinds % 3}
    yield {"call": "guess_for_two", "tokens": [1, 2, 3, 1, 2], "most": 2,
           "others": [7, 7, 1, 2, 9, 1, 2]}
    yield {"call": "guess_often", "number": 20_000, "kinds": rng.choice([89, 97, 101])}
    yield {"call": "guess", "prompt": [5, 7, 2, 9, 5, 7], "generated": [2, 4, 7], "most": 3}


# --- b --------------------------------------------------------------------------------------------

def kinds_of_requests():
    """Decodes with much room or little: tokens to come, pages. Then prompts, and a last position"""
    kinds = []
    for new, pages in (9, 9), (1, 9), (2, 9), (3, 9), (9, 2), (9, 3):
        kinds.append({**DECODE, "new": new, "pages": pages})
    kinds.append({"prompt": 6, "computed": 1, "n": 3})
    kinds.append({"prompt": 6, "computed": 3, "n": 1})
    kinds.append({"prompt": 20, "generated": 3, "computed": 22, "n": 1, "new": 9})
    return kinds


def rooms(rng):
    for plan in lists(rng, kinds_of_requests())[1:]:
        planned = sum(row["n"] for row in plan)
        yield {"call": "draft", "plan": plan,
               "most": rng.randint(0, 6),
               "page_size": rng.choice([3, 3, 4]),
               "token_budget": planned + rng.randint(0, 12),
               "has": rng.choice([0, 1, 2, 9, 9])}
    ac = {"prompt": [1, 2, 3, 1, 2], "computed": 4, "n": 1}
    # The first guess is shorter than it may be, and leaves room for the second.
    yield {"call": "draft", "plan": [ac, ac], "token_budget": 5, "most": 3, "page_size": 8,
           "has": 1}
    yield {"call": "draft", "plan": [ac, ac, {"prompt": 5, "n": 2}], "token_budget": 8, "most": 3,
           "page_size": 8, "has": 3}


# --- c --------------------------------------------------------------------------------------------

def request(rng, prompt, new, **more):
    """A request with so many random tokens in its prompt."""
    return {"prompt": random_tokens(rng, 13, prompt), "new": new, **more}


def runs(rng):
    for new, rights in (1, [1]), (2, [0]), (3, [0]), (3, [1]), (4, [2]), (6, [2, 0, 1]):
        yield {"call": "generate", "requests": [request(rng, 2, new)], "rights": rights}
    # a long prompt alone; and one to the model's last position
    yield {"call": "generate", "requests": [request(rng, 11, 3)], "rights": [1], "token_budget": 4}
    yield {"call": "generate", "requests": [request(rng, 20, 30)], "rights": [2, 1]}
    for eos_token in 8, 6, 9, 5, 2, 12:   # accepted ends of text, and guesses beyond them
        until_eos = {"prompt": [1, 2], "new": 12, "eos_token": eos_token}
        yield {"call": "generate", "rights": [4], "requests": [until_eos]}
    yield from runs_of_many(rng)
    yield from runs_with_pages_found()
    yield from runs_with_the_lookup(rng)


def runs_of_many(rng):
    for number, budget in (2, 64), (3, 12), (5, 9):
        requests = []
        for i in range(number):
            prompt, new = rng.randint(1, 9), rng.randint(1, 9)
            temperature = 0.9 * (i % 2)
            requests.append(request(rng, prompt, new, arrival=i // 2, temperature=temperature))
        rights = [rng.randint(0, 3) for _ in range(4)]
        yield {"call": "generate", "rights": rights, "token_budget": budget, "max_batch": 3,
               "requests": requests}


def runs_with_pages_found():
    """The second request comes when the first has left, and finds its pages."""
    # Of the first one's pages, a wrong guess fills one, and a right one another: both are found.
    first = {"prompt": [1, 2], "new": 12}
    second = {"prompt": [1, 2, 8, 6, 8, 9, 5, 5, 1, 2, 5], "new": 2, "arrival": 20}
    yield {"call": "generate", "rights": [0, 1, 3], "page_size": 4, "requests": [first, second]}
    # With its last token, a right guess fills a page: it is cached before the request leaves.
    first = {"prompt": [1, 2], "new": 3}
    second = {"prompt": [1, 2, 8, 6, 8], "new": 2, "arrival": 20}
    yield {"call": "generate", "rights": [1], "page_size": 2, "requests": [first, second]}


def runs_with_the_lookup(rng):
    """Pages that are found again, and preemptions; then guesses none and four at once."""
    for page_size in 1, 2, 4:
        stem = random_tokens(rng, 3, 8)
        requests = []
        for i in range(3):
            requests.append({"prompt": [*stem, i], "new": 10, "arrival": 4 * i})
        pages = 9 if page_size == 2 else None
        yield {"call": "generate", "page_size": page_size, "guesses": 3, "max_batch": 2,
               "pages": pages, "requests": requests}
    repeated = {"prompt": [1, 2, 3, 1, 2, 3], "new": 9}
    yield {"call": "generate", "requests": [repeated], "guesses": 0}
    yield {"call": "generate", "requests": [repeated], "guesses": 4}
    yield {"call": "generate_on_a_device", "requests": [repeated, {"prompt": 3, "new": 4}]}


def cases(rng):
    return {"a": [*lookups(rng)],
            "b": [*rooms(rng)],
            "c": [*runs(rng)]}
