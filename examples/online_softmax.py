"""The online softmax by hand: the scores 1, 2, 3, 0 in two blocks of two.

    python examples/online_softmax.py

The softmax of a row divides by ``sum(exp(s - max(s)))``, and the maximum is known only at the end. The
online softmax keeps the maximum so far, ``m``, and the sum relative to it, ``l``; when a block raises the
maximum, the old sum is scaled by ``alpha = exp(m_old - m_new)``. Attention does the same with the weighted
sum of the values, ``acc``. The result is exact: nothing is approximated, and no row of scores is stored.
"""

import jax.numpy as jnp
import numpy as np

from flashjax import softmax

scores = jnp.array([[1.0, 2.0, 3.0, 0.0]])  # one row of the score matrix: one query, four keys
values = jnp.array([[1.0], [2.0], [3.0], [4.0]])  # one number a key

m = jnp.array([-jnp.inf])  # the largest score so far
l = jnp.array([0.0])  # the sum of exp(score - m) so far
acc = jnp.array([[0.0]])  # the sum of exp(score - m) * value so far

for block in range(2):
    part = slice(2 * block, 2 * block + 2)
    s, v = scores[:, part], values[part]
    old_m, old_l = m.item(), l.item()
    p, alpha, m, l = softmax.step(m, l, s)
    acc = alpha[:, None] * acc + p @ v

    numbers = ", ".join(f"{x:.0f}" for x in s[0])
    terms = " + ".join(f"exp({x:.0f} - {m.item():.0f})" for x in s[0])
    print(f"block {block + 1}: scores {numbers}")
    print(f"  m      {old_m:.0f} -> {m.item():.0f}")
    print(f"  alpha  exp({old_m:.0f} - {m.item():.0f}) = {alpha.item():.3f}")
    print(f"  old l  alpha * {old_l:.3f} = {alpha.item() * old_l:.3f}")
    print(f"  new    {terms} = {p.sum().item():.3f}")
    print(f"  l      {alpha.item() * old_l:.3f} + {p.sum().item():.3f} = {l.item():.3f}")
    print(f"  acc    {acc.item():.3f}")

inverse, lse = softmax.finish(m, l)
out = acc * inverse[:, None]
print(f"end: output acc / l = {out.item():.3f}, log-sum-exp m + log(l) = {lse.item():.3f}")

weights = np.exp([1.0 - 3.0, 2.0 - 3.0, 3.0 - 3.0, 0.0 - 3.0])
total, mean = weights.sum(), weights @ [1, 2, 3, 4] / weights.sum()
print(f"textbook: sum(exp(s - max)) = {total:.3f}, output {mean:.3f}")
np.testing.assert_allclose(l.item(), total, rtol=1e-6)
np.testing.assert_allclose(out.item(), mean, rtol=1e-6)
