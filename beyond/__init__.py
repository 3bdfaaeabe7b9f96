"""
One short file for each question that comes after the ladder. * : the file before it has a command

    fairness             who goes first?
    tensor_parallel *    weights on several devices
    hardware, arrivals, published, simulate *    any GPU, calculated
    capacity *           how many GPUs?
    speculative *        guess several tokens, check them in one pass
    ahead *              plan the next pass while this one runs
    fork *               several answers to one prompt
"""
