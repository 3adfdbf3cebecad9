"""Look at attention: the weights of chosen rows, drawn in the terminal.

    python examples/attention_map.py
    python examples/attention_map.py --text "a rose is a rose is a rose is a rose" --rows 20
    python examples/attention_map.py --png map.png

A few seconds on a CPU; ``--png`` also writes a picture and needs matplotlib. `flash_attention` runs on a
line of text, a token a character, with two heads made by hand, so that what they must look at is known:

- An induction head, as language models learn it: it looks for where the last two characters stood before, at
  what came next there. What it mixes is its guess of the next character.
- A head that looks for its own character in a window of the 16 before it.

Where there is nothing to find both rest on the first character, which the mask of either keeps in sight. The
call returns the log-sum-exp of each row, and from it `attention_weights` computes the rows that are shown. A
line is one of them: its position and character (``␣`` is a space), its weights from ``·`` (below 0.05) to
``█`` (0.9 and more), and the largest of them. The end says how far ``weights @ value`` is from the output,
and what a few rows of a long sequence take.
"""

import argparse
import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np

from flashjax import CustomMask, attention_weights, flash_attention

TEXT = "peter piper picked a peck of pickled peppers"
TITLES = ("induction: what came after these two characters?", "window of 16: where is my own character?")
SHADES, STEPS = "·░▒▓█", (0.05, 0.3, 0.6, 0.9)
WINDOW = 16
MATCH = 8.0  # logit of one character that agrees


def visible(b, h, q, k):
    """Let head 0 see the past and itself, head 1 the window before it, and both the first character."""
    past = (k < q) & (q - k <= WINDOW)
    return jnp.where(h == 0, k <= q, past | (k == 0))


def make_heads(text: str) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return query, key and value ``[1, T, 2, D]``, and the bias ``[2, 1, T]`` that lets a head rest.

    In head 0 a query holds its own character and the one before it, a key the two before itself: their
    product counts how many agree. In head 1 either holds its own. A value is the key's own character.
    """
    letters = sorted(set(text))
    own = np.eye(len(letters), dtype=np.float32)[[letters.index(c) for c in text]]
    before, before2 = (np.pad(own, ((n, 0), (0, 0)))[: len(own)] for n in (1, 2))
    findable = np.concatenate([0 * own[:1], own[1:]])  # the first character is there to rest on
    heads = lambda first, second: jnp.asarray(np.stack([np.hstack(first), np.hstack(second)], axis=1)[None])
    query = heads([own, before], [own, 0 * own])
    key = heads([before, before2], [findable, 0 * own])
    rest = np.zeros((2, 1, len(text)), np.float32)
    rest[:, 0, 0] = 1.5 * MATCH, 0.5 * MATCH  # less than what is looked for: two characters, and one
    return query, key, heads([own], [own]), jnp.asarray(rest)


def draw(weights: np.ndarray, text: str, rows: np.ndarray) -> str:
    """Draw ``[R, S]`` weights, a line a row."""
    lines = [f"{'':6}{text}"]
    for row, p in zip(rows, weights, strict=True):
        shades = "".join(SHADES[i] for i in np.searchsorted(STEPS, p, side="right"))
        most = int(p.argmax())
        lines.append(f"{row:3d} {text[row]} {shades}  {p[most]:.2f} at {most:2d} {text[most]}")
    return "\n".join(lines)


def save(path: str, weights: np.ndarray, text: str, rows: np.ndarray) -> None:
    """Write a picture of ``[heads, R, S]`` weights."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(0.18 * len(text) + 1, 0.36 * len(rows) + 2), layout="constrained")
    for title, p, axes in zip(TITLES, weights, figure.subplots(len(weights), 1), strict=True):
        axes.imshow(p, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        axes.set_title(title)
        axes.set_xticks(range(len(text)), list(text))
        axes.set_yticks(range(len(rows)), [f"{row} {text[row]}" for row in rows])
    figure.savefig(path, dpi=150)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw attention weights of chosen rows in the terminal.")
    parser.add_argument("--text", default=TEXT, help="a line, two characters or more")
    parser.add_argument("--rows", type=int, default=15, help="how many rows to show, the last ones")
    parser.add_argument("--png", metavar="FILE", help="also write a picture; needs matplotlib")
    options = parser.parse_args(arguments)
    text = options.text.replace(" ", "␣")
    if len(text) < 2 or not text.isprintable() or not 0 < options.rows <= len(text):
        parser.error("--text must be a printable line, and --rows at least 1 and at most its length")
    if options.png and importlib.util.find_spec("matplotlib") is None:
        parser.error("--png needs matplotlib: pip install matplotlib")

    query, key, value, bias = make_heads(text)
    changes = {"bias": bias, "mask": CustomMask(visible), "scale": MATCH}
    out, lse = flash_attention(query, key, value, **changes, return_residual=True)
    rows = np.arange(len(text) - options.rows, len(text))
    weights = np.asarray(attention_weights(query, key, lse, rows, **changes))[0]

    for title, p in zip(TITLES, weights, strict=True):
        print(f"{title}\n{draw(p, text, rows)}\n")
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
    mixed = np.einsum("nrs,snd->rnd", weights, np.asarray(value[0]))
    difference = np.abs(mixed - np.asarray(out[0, rows])).max()
    assert difference < 1e-5
    print(f"every row sums to 1; weights @ value and the output differ by at most {difference:.0e}")

    # Nothing is computed here: shapes alone.
    x = jax.ShapeDtypeStruct((1, 2**17, 8, 64), jnp.bfloat16)
    residual = functools.partial(flash_attention, is_causal=True, return_residual=True)
    _, lse = jax.eval_shape(residual, x, x, x)
    few = jax.eval_shape(lambda q, k, lse: attention_weights(q, k, lse, [0, 7, 99, 131071]), x, x, lse)
    whole = few.size // few.shape[2] * few.dtype.itemsize * 2**17
    print(f"4 rows of {2**17} tokens, 8 heads: {few.size * few.dtype.itemsize / 2**20:.0f} MiB, ", end="")
    print(f"where the whole map is {whole / 2**30:.0f} GiB")

    if options.png:
        save(options.png, weights, text, rows)
        print(f"wrote {options.png}")


if __name__ == "__main__":
    main()
