"""
Workloads whose plans are compared with those of vLLM's scheduler (plans.py): random ones, of kinds.

A workload is plain data, a line of JSON: the knobs of a scheduler, and requests. A request has

    name, prompt, answer    the answer is known, because no model runs
    arrival, priority
    max_new_tokens, stop    of some: the answer ends before that, with this stop token
    abort                   of some: the step before which the client gives up

Prompts hold what others' prompts and answers hold (`continued`). Otherwise no page of an answer
could ever be found, and nobody would see when it can be found.
"""
import math
import random

LARGEST = 99   # tokens are 1 to 99
STOP = 100     # stands in an answer only at its end


# --- what they are made of ------------------------------------------------------------------------

def tokens(stream, number, largest=LARGEST):
    return [stream.randint(1, largest) for _ in range(number)]


def text(stream, number):
    """
    Tokens in pieces that count upwards. So a page's own tokens also stand after other beginnings,
    where they must not be found. And a file of many texts can be compressed.
    """
    made = []
    while len(made) < number:
        first = stream.randint(1, LARGEST)
        last = min(first + stream.randint(3, 40), LARGEST)
        made += range(first, last + 1)
    return made[:number]


def request(prompt, answer, arrival=0):
    return dict(prompt=prompt, answer=answer, arrival=arrival)


def arrival(stream, last):
    """Half of the requests are there at once."""
    return stream.choice([0, stream.randint(0, last)])


def continued(stream, requests, share, longest=300):
    """
    This share of the prompts becomes a conversation: another request's prompt, some of its answer
    or all of it, and something new. The other may run at that time, or wait, or have ended.
    """
    for each in requests:
        before = stream.choice(requests)
        said = before["answer"][:stream.randint(0, len(before["answer"]))]
        prompt = before["prompt"] + said + text(stream, stream.randint(1, 6))
        if before is not each and stream.random() < share and len(prompt) <= longest:
            each["prompt"] = prompt
    return requests


def limit(each):
    return each.get("max_new_tokens", len(each["answer"]))


def least_pages(requests, page_size):
    """What the largest request needs: with fewer, it would be refused."""
    tokens_needed = [len(each["prompt"]) + limit(each) - 1 for each in requests]
    return math.ceil(max(tokens_needed) / page_size)


def workload(requests, max_batch, token_budget, page_size, more_pages):
    """more_pages: beyond those that the largest request needs"""
    return dict(
        max_batch=min(max_batch, token_budget),   # vLLM refuses more
        token_budget=token_budget,
        pages=least_pages(requests, page_size) + more_pages,
        page_size=page_size,
        requests=requests)


# --- kinds ----------------------------------------------------------------------------------------

def mixed(stream):
    """Common beginnings, arrivals; half are short of memory."""
    beginnings = [text(stream, stream.randint(8, 60)) for _ in range(2)]
    requests = []
    for _ in range(stream.randint(2, 12)):
        beginning = stream.choice([[], stream.choice(beginnings)])
        prompt = beginning + text(stream, stream.randint(1, 80))
        answer = text(stream, stream.randint(1, 30))
        requests.append(request(prompt, answer, arrival(stream, 30)))
    return workload(
        continued(stream, requests, 0.3),
        max_batch=stream.randint(2, 8),
        token_budget=stream.choice([16, 32, 64, 256]),
        page_size=stream.choice([4, 8, 16]),
        more_pages=stream.choice([stream.randint(1, 6), 400]))


def twins(stream):
    """Equal prompts and equal answers, few tokens, small budgets, little memory."""
    largest = stream.choice([1, 2, LARGEST])
    pairs = []
    for _ in range(stream.randint(1, 3)):
        prompt = tokens(stream, stream.randint(1, 30), largest)
        pairs.append((prompt, tokens(stream, stream.randint(1, 30), largest)))
    requests = []
    for _ in range(stream.randint(2, 10)):
        prompt, answer = stream.choice(pairs)
        if stream.random() < 0.3:
            prompt = prompt[:stream.randint(1, len(prompt))]
        answer = answer[:stream.randint(1, len(answer))]
        requests.append(request(prompt, answer, arrival(stream, 20)))
    return workload(
        continued(stream, requests, 0.2),
        max_batch=stream.randint(1, 8),
        token_budget=stream.choice([1, 2, 3, 5, 8, 16, 64]),
        page_size=stream.choice([1, 2, 4, 8]),
        more_pages=stream.choice([0, 0, 1, 2, stream.randint(0, 12), 400]))


def small_budgets(stream):
    """The budget is smaller than a page: each page takes several steps."""
    page_size = stream.choice([4, 8, 16])
    requests = []
    for _ in range(stream.randint(2, 5)):
        prompt = text(stream, stream.randint(1, 40))
        answer = text(stream, stream.randint(1, 15))
        requests.append(request(prompt, answer, arrival(stream, 20)))
    return workload(
        continued(stream, requests, 0.4, longest=60),
        max_batch=stream.randint(1, 4),
        token_budget=stream.randint(1, page_size - 1),
        page_size=page_size,
        more_pages=stream.choice([0, 1, stream.randint(0, 6)]))


def one_at_a_time(stream):
    """Only one request runs at a time; what the others computed is found, if it is still there."""
    requests = []
    for _ in range(stream.randint(2, 6)):
        prompt = text(stream, stream.randint(1, 40))
        answer = text(stream, stream.randint(1, 12))
        requests.append(request(prompt, answer, arrival(stream, 40)))
    return workload(
        continued(stream, requests, 0.6),
        max_batch=1,
        token_budget=stream.choice([4, 16, 64]),
        page_size=stream.choice([1, 2, 4, 8]),
        more_pages=stream.choice([0, 1, stream.randint(0, 12), 100]))


def long_prompts(stream):
    """Prompts of up to 1,200 tokens, a few chunks each."""
    requests = []
    for _ in range(stream.randint(2, 5)):
        prompt = text(stream, stream.randint(200, 1100))
        answer = text(stream, stream.randint(1, 20))
        requests.append(request(prompt, answer, arrival(stream, 12)))
    return workload(
        continued(stream, requests, 0.4, longest=1200),
        max_batch=stream.randint(1, 4),
        token_budget=stream.choice([64, 128, 512]),
        page_size=stream.choice([16, 32]),
        more_pages=stream.choice([0, stream.randint(1, 20), 200]))


def stop_tokens(stream):
    """Most answers end by a stop token, which nobody could foresee."""
    requests = []
    for _ in range(stream.randint(2, 9)):
        prompt = text(stream, stream.randint(1, 30))
        each = request(prompt, text(stream, stream.randint(1, 20)), arrival(stream, 20))
        if stream.random() < 0.75:
            each["answer"][-1] = STOP
            each["stop"] = STOP
            each["max_new_tokens"] = len(each["answer"]) + stream.randint(0, 20)
        requests.append(each)
    return workload(
        continued(stream, requests, 0.3),
        max_batch=stream.randint(1, 8),
        token_budget=stream.choice([2, 8, 32, 64]),
        page_size=stream.choice([1, 2, 4, 8]),
        more_pages=stream.choice([0, 1, stream.randint(0, 8), 100]))


def one_token_answers(stream):
    """Each answer has a single token: no request decodes, unless it was preempted."""
    requests = []
    for _ in range(stream.randint(3, 14)):
        prompt = text(stream, stream.randint(1, 40))
        requests.append(request(prompt, tokens(stream, 1), arrival(stream, 8)))
    return workload(
        continued(stream, requests, 0.4),
        max_batch=stream.randint(1, 8),
        token_budget=stream.choice([2, 8, 32, 64]),
        page_size=stream.choice([1, 2, 4, 8]),
        more_pages=stream.choice([0, 1, stream.randint(0, 12), 100]))


def beginnings(stream):
    """All prompts are beginnings of one text, and the answers go on with it."""
    whole = text(stream, 90)
    requests = []
    for _ in range(stream.randint(2, 9)):
        length = stream.randint(1, 60)
        answer = whole[length:length + stream.randint(1, 20)]
        if stream.random() < 0.3:
            answer = text(stream, len(answer))
        requests.append(request(whole[:length], answer, arrival(stream, 25)))
    return workload(
        requests,
        max_batch=stream.randint(1, 8),
        token_budget=stream.choice([2, 5, 16, 64]),
        page_size=stream.choice([1, 2, 4, 8]),
        more_pages=stream.choice([0, 1, stream.randint(0, 8), 100]))


def conversations(stream):
    """Turns that come while the one before is still answered, or just after, or much later."""
    requests = []
    for _ in range(stream.randint(1, 4)):
        history, step = text(stream, stream.randint(1, 20)), 0
        for _ in range(stream.randint(2, 5)):
            answer = text(stream, stream.randint(1, 12))
            requests.append(request(history, answer, step))
            said = answer[:stream.randint(0, len(answer))]
            history = history + said + text(stream, stream.randint(1, 6))
            step += stream.randint(0, 2 * len(answer))
    return workload(
        requests,
        max_batch=stream.randint(2, 8),
        token_budget=stream.choice([4, 8, 32, 64]),
        page_size=stream.choice([1, 1, 2, 4]),
        more_pages=stream.choice([0, 2, stream.randint(0, 20), 200]))


def aborts(stream):
    """Clients give up: while a request waits, in the middle of its prompt, or in its answer."""
    requests = []
    for _ in range(stream.randint(2, 9)):
        prompt = text(stream, stream.randint(1, 40))
        each = request(prompt, text(stream, stream.randint(1, 20)), arrival(stream, 15))
        if stream.random() < 0.5:
            each["abort"] = each["arrival"] + stream.randint(0, 25)
        requests.append(each)
    return workload(
        continued(stream, requests, 0.3),
        max_batch=stream.randint(1, 6),
        token_budget=stream.choice([2, 8, 32]),
        page_size=stream.choice([1, 2, 4, 8]),
        more_pages=stream.choice([0, 1, stream.randint(0, 8), 100]))


def returns(stream):
    """Newcomers at nearly each step, and so little memory that preempted requests wait, too."""
    step, requests = 0, []
    for _ in range(stream.randint(4, 12)):
        prompt = text(stream, stream.randint(1, 12))
        requests.append(request(prompt, text(stream, stream.randint(8, 25)), step))
        step += stream.randint(0, 3)
    return workload(
        continued(stream, requests, 0.3, longest=40),
        max_batch=stream.randint(3, 8),
        token_budget=stream.choice([8, 16, 32]),
        page_size=stream.choice([1, 2, 4]),
        more_pages=stream.randint(0, 4))


def crowds(stream):
    """Many short requests at once."""
    starts = [text(stream, stream.randint(1, 10)) for _ in range(stream.randint(1, 4))]
    requests = []
    for _ in range(stream.choice([30, 40, 50, 80, 300])):
        prompt = stream.choice(starts) + text(stream, stream.randint(0, 3))
        requests.append(request(prompt, text(stream, stream.randint(1, 2))))
    return workload(
        requests,
        max_batch=stream.choice([16, 64, 256]),
        token_budget=stream.choice([64, 256]),
        page_size=stream.choice([1, 2, 4]),
        more_pages=stream.choice([10, 50, 400]))


KINDS = {make.__name__.replace("_", " "): make for make in (
    mixed, twins, small_budgets, one_at_a_time, long_prompts, stop_tokens, one_token_answers,
    beginnings, conversations, aborts, returns, crowds)}


def workloads(kind, number, seed):
    """So many workloads of a kind."""
    stream = random.Random(f"{kind} {seed}")
    for _ in range(number):
        work = dict(kind=kind, **KINDS[kind](stream))
        for i, each in enumerate(work["requests"]):
            each["name"] = f"r{i}"
            each["priority"] = stream.choice([0, 0, 1, 2])
        yield work
