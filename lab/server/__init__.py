"""
Requests that come while the batch runs: OpenAI's HTTP interface in front of the prefix stage's
loop.

    engine      the loop, opened                    schemas     what a body may hold
    app         the routes and the metrics          answers     tokens become text, in OpenAI's form
    live        the page that shows every step      __main__    python -m lab.server
"""
