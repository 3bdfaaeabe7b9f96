"""
The KV cache: keys and values that are kept, because a later token never changes them.

By the causal rule the last token changes nothing that earlier tokens computed. So their keys and
values stay as they are, and a pass computes the new token alone. Two things are saved:

    every linear layer    runs for 1 token instead of n: this is most of the saving
    attention             one row of n scores instead of n rows: O(n) per token, not O(n^2)

(For a token of the smallest GPT-2 at n = 1,024, the linear layers take 247 million operations, the
vocabulary included; attention's scores and its weighted sum take 38 million.)

    layer 0   k  | k0 k1 k2 k3 .  .  .  . |      capacity 8, in tokens
              v  | v0 v1 v2 v3 .  .  .  . |      write: in place, at `start`
    layer 1   ...                                read: a view of the first `end` tokens

One token costs 2 x n_layer x n_embd numbers: 18,432 for the smallest GPT-2, 72 KiB in float32.
"""


class KV:
    """
    Keys and values of one sequence; or of all rows of a batch, or of all pages of a pool.

    Each layer has two buffers (..., capacity, hs), made when it is first written. They take leading
    axes, dtype and device of what is written: (B, nh) for a static batch, (1, nh) in unbatched,
    (nh,) where each request or the pool has its own KV.
    """

    def __init__(self, capacity):
        self.capacity = capacity   # in tokens
        self.k, self.v = {}, {}    # layer -> (..., capacity, hs)

    def buffers(self, layer, k, v):
        """A layer's two buffers. If they are new, k and v tell their axes, dtype and device."""
        if layer not in self.k:
            self.k[layer] = k.new_zeros(*k.shape[:-2], self.capacity, k.size(-1))
            self.v[layer] = v.new_zeros(*v.shape[:-2], self.capacity, v.size(-1))
        return self.k[layer], self.v[layer]

    def write(self, layer, start, k, v):
        """Puts k and v (..., T, hs) at start to start + T - 1. ValueError if they do not fit."""
        end = start + k.size(-2)
        if end > self.capacity:
            raise ValueError(f"KV of {self.capacity} tokens cannot take tokens "
                             f"{start} to {end - 1}")
        all_k, all_v = self.buffers(layer, k, v)
        all_k[..., start:end, :] = k
        all_v[..., start:end, :] = v

    def read(self, layer, end):
        """Keys and values of the first `end` tokens, (..., end, hs) each: views, not copies."""
        return self.k[layer][..., :end, :], self.v[layer][..., :end, :]

    @property
    def bytes_per_token(self):
        """Bytes of a token, in all layers and rows. 0 before anything is written."""
        return sum(t.nbytes for t in (*self.k.values(), *self.v.values())) // self.capacity
