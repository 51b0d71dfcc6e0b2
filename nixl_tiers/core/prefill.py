"""Prefill estimate: how long the engine takes to compute a part of a prompt, learned from its own steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil
from typing import Final

MIN_SAMPLES: Final = 3  # with fewer nothing is known: the first steps of an engine compile
SAMPLES_PER_SHAPE: Final = 4
MAX_SHAPES: Final = 20
FEW_TOKENS: Final = 16  # of fewer, what a step takes hardly depends on their context: one shape, and not many
FIT_EVERY: Final = 16  # samples; while there are few, as soon as there are a quarter more
ITERATIONS: Final = 3  # each goes on from the last fit
NOISE: Final = 0.02  # relative: what is closer to the fit than this weighs no more
FAR: Final = 3.0  # times as long as expected, or as short: something else than the step was measured
HALF_LIFE: Final = 64  # samples after which an old one weighs half: clocks, neighbours and settings change
RIDGE: Final = 1e-4  # what samples of one shape cannot tell apart is time of the tokens
MOST: Final = 10**9  # tokens
SHORTEST_S: Final = 1e-6  # no step
LONGEST_S: Final = 3600.0
STEP_TOKENS: Final = 2048  # of the largest step, until the engine says it

Sample = tuple[int, float, float]  # tokens, mean context, seconds
Vector = tuple[float, float, float]


@dataclass(frozen=True)
class _Seen:
    number: int
    tokens: int
    context: float
    seconds: float
    terms: Vector  # that the coefficients are of


class PrefillEstimate:
    """Seconds of a step = `step_s` + `token_s` x tokens + `context_s` x the sum of their context lengths.

    The last term is attention, quadratic in the length of a prompt. The three are fitted to the last steps of each
    shape (tokens and context in powers of two), so that a long run of one kind of prompt does not make it forget the
    others, by least absolute relative errors: a step that compiled, or whose time or tokens are wrong, has no more
    weight than any other. None of the three is ever negative.
    """

    def __init__(self, tokens_per_s: float | None = None, step_tokens: int = STEP_TOKENS) -> None:
        """`tokens_per_s`: the speed, if it is set and not to be learned. `step_tokens`: the most of a step."""
        self._fixed = tokens_per_s
        self._step_tokens = step_tokens
        self._seen: dict[tuple[int, int], deque[_Seen]] = {}  # by shape, the one with the latest sample last
        self._samples = 0  # ever
        self._fit_at = MIN_SAMPLES
        self._fit: Vector | None = None if tokens_per_s is None else (0.0, 1 / tokens_per_s, 0.0)

    def observe(self, tokens: int, context: float, seconds: float) -> None:
        """A step has computed `tokens` tokens of prompts in `seconds`, each with a context (the tokens of its request
        up to it) of `context` tokens on average. Steps that only decode are no measure of prefill: leave them out. One
        that computes the last token of a prompt whose others were loaded is: it shows what any step takes.
        """
        if self._fixed is not None or not _plausible(tokens, context, seconds):
            return
        self._add(tokens, context, seconds)
        if self._samples >= self._fit_at:
            self._fit_at = self._samples + min(max(self._samples // 4, 1), FIT_EVERY)
            self._refit()

    def limit_step(self, tokens: int) -> None:
        """The engine computes no more tokens of a prompt in a step, whatever steps of other processes did."""
        self._step_tokens = tokens

    def seconds(self, start: int, end: int) -> float | None:
        """To compute the tokens [start, end) of one request, with everything before `start` in the engine's memory, in
        as many steps as that takes. None while unknown."""
        if self._fit is None:
            return None
        tokens = end - start
        if tokens <= 0:
            return 0.0
        step_s, token_s, context_s = self._fit
        return ceil(tokens / self._step_tokens) * step_s + tokens * (token_s + context_s * (start + end) / 2)

    @property
    def tokens_per_s(self) -> float | None:
        """The speed of a full first step, for people. None while unknown."""
        seconds = self.seconds(0, self._step_tokens)
        return self._step_tokens / seconds if seconds else None

    @property
    def seen(self) -> int:
        """How many samples there were, those of earlier processes included."""
        return self._samples

    def samples(self) -> list[Sample]:
        """What the estimate rests on, the oldest first, for `restore` in another process."""
        kept = sorted((seen for shape in self._seen.values() for seen in shape), key=lambda seen: seen.number)
        return [(seen.tokens, seen.context, seen.seconds) for seen in kept]

    def restore(self, samples: Iterable[Sample]) -> None:
        """Begin with the samples of an earlier process."""
        if self._fixed is not None:
            return
        for sample in samples:
            if _plausible(*sample):
                self._add(*sample)
        if self._samples >= MIN_SAMPLES:
            self._fit_at = self._samples + 1
            self._refit()

    def _add(self, tokens: int, context: float, seconds: float) -> None:
        self._samples += 1
        shape = (tokens.bit_length(), int(context).bit_length() if tokens >= FEW_TOKENS else 0)
        seen = self._seen.pop(shape, None)
        if seen is None:
            seen = deque(maxlen=SAMPLES_PER_SHAPE)
            if len(self._seen) == MAX_SHAPES:
                del self._seen[next(iter(self._seen))]
        self._seen[shape] = seen
        seen.append(_Seen(self._samples, tokens, context, seconds, (1.0, tokens, tokens * context)))

    def _refit(self) -> None:
        """Iteratively reweighted least squares of errors relative to the fit before. Relative to the sample, one that
        is far too short would outweigh all others."""
        samples = [seen for shape in self._seen.values() for seen in shape]
        ages = [2.0 ** ((seen.number - self._samples) / HALF_LIFE) for seen in samples]
        rates = sorted(seen.seconds / seen.tokens for seen in samples)
        fit: Vector = (0.0, rates[len(rates) // 2], 0.0) if self._fit is None else self._fit
        for _ in range(ITERATIONS if self._samples > 2 * FIT_EVERY else 2 * ITERATIONS):
            expected = [max(_dot(seen.terms, fit), SHORTEST_S) for seen in samples]
            parts = [(x / e, y / e, z / e) for (x, y, z), e in zip((s.terms for s in samples), expected, strict=True)]
            # Scaled, so that the ridge means the same for each term.
            a, b, c = (sum(part[i] for part in parts) / len(parts) or 1.0 for i in range(3))
            rows = [(x / a, y / b, z / c) for x, y, z in parts]
            sides = [seen.seconds / e for seen, e in zip(samples, expected, strict=True)]
            weights = [age / max(NOISE, abs(side - 1)) for age, side in zip(ages, sides, strict=True)]
            x, y, z = _solve_not_negative(_normal_equations(weights, rows, sides))
            fit = x / a, y / b, z / c
        # On a machine that others use too, slow steps are farther off than fast ones: those errors are least at the
        # median, and sums of many steps go by the mean.
        expected = [_dot(seen.terms, fit) for seen in samples]
        usual = [
            (a, s.seconds, e)
            for a, s, e in zip(ages, samples, expected, strict=True)
            if e < FAR * s.seconds < FAR * FAR * e
        ]
        if mean_s := sum(age * e for age, _, e in usual):
            scale = sum(age * seconds for age, seconds, _ in usual) / mean_s
            fit = fit[0] * scale, fit[1] * scale, fit[2] * scale
        self._fit = fit


def _plausible(tokens: int, context: float, seconds: float) -> bool:
    return 0 < tokens < MOST and 0 <= context < MOST and SHORTEST_S < seconds < LONGEST_S


def _dot(a: Vector, b: Vector) -> float:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


def _normal_equations(weights: list[float], rows: list[Vector], sides: list[float]) -> list[list[float]]:
    """3 x 4: the matrix and its right side. The ridge is on the terms that one shape of samples cannot tell from the
    time of tokens."""
    xx = xy = xz = yy = yz = zz = x1 = y1 = z1 = 0.0
    for weight, (x, y, z), side in zip(weights, rows, sides, strict=True):
        x_weight, y_weight, z_weight = weight * x, weight * y, weight * z
        xx += x_weight * x
        xy += x_weight * y
        xz += x_weight * z
        yy += y_weight * y
        yz += y_weight * z
        zz += z_weight * z
        x1 += x_weight * side
        y1 += y_weight * side
        z1 += z_weight * side
    ridge = RIDGE * sum(weights)
    return [[xx + ridge, xy, xz, x1], [xy, yy + ridge * 1e-3, yz, y1], [xz, yz, zz + ridge, z1]]


def _solve_not_negative(matrix: list[list[float]]) -> Vector:
    """Least squares without negative terms: of all sets of terms the one whose solution has no negative term, and the
    least error."""
    best, least = (0.0, 0.0, 0.0), float("inf")
    for terms in ((0, 1, 2), (0, 1), (1, 2), (0, 2), (1,), (0,), (2,)):
        solution = _solve(matrix, terms)
        if solution is None or min(solution) < 0:
            continue
        # |Ax - y|^2 = xAAx - 2xAy + yy, and AAx = Ay on the terms of a solution.
        error = -sum(solution[i] * matrix[i][3] for i in terms)
        if error < least:
            best, least = solution, error
    return best


def _solve(matrix: list[list[float]], terms: tuple[int, ...]) -> Vector | None:
    """Gaussian elimination over `terms`; the other terms are 0. The matrix is positive definite."""
    rows = [[matrix[i][j] for j in terms] + [matrix[i][3]] for i in terms]
    size = len(terms)
    for i in range(size):
        if rows[i][i] <= 0:
            return None
        for k in range(i + 1, size):
            factor = rows[k][i] / rows[i][i]
            rows[k] = [x - factor * y for x, y in zip(rows[k], rows[i], strict=True)]
    values = [0.0, 0.0, 0.0]
    for i in reversed(range(size)):
        rest = sum(rows[i][j] * values[terms[j]] for j in range(i + 1, size))
        values[terms[i]] = (rows[i][size] - rest) / rows[i][i]
    return values[0], values[1], values[2]
