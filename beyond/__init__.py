"""
One short file for each question that comes after the last stage. *: it has a command.

    fairness *          who goes first?
    prepacked *         several prompts in one row
    tensor_parallel *   weights on several devices
    speculative *       guess several tokens, check them in one pass
    ahead *             plan the next pass while this one runs
    rollout *           weights that change while requests run
    sessions *          agents that pause, and come back with a longer prompt
    hybrid *            layers that see a window only
"""
