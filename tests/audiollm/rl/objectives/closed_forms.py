"""Every objective once more, in plain Python, item by item, as its paper writes it."""

from __future__ import annotations

import math
from typing import Any

from tests.audiollm.rl.objectives.objective_cases import (
    ALTERED,
    CHOSEN,
    KL,
    LENGTHS,
    LIST_SCORES,
    LISTS,
    MARGIN_CENTER,
    MARGINS,
    PROMPT_LENGTHS,
    REJECTED,
    RUNNING_MEAN,
    SINGLE_SCORES,
    SINGLES,
    STEP_ANSWERS,
    STEP_LABELS,
    VERDICTS,
    ClosedForm,
    Numbers,
    best_answers,
)

PAIRED = list(zip(CHOSEN, REJECTED, strict=True))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def nls(x: float) -> float:
    """-log sigmoid(x)."""
    return math.log(1 + math.exp(-x))


def smoothed(x: float, e: float) -> float:
    return (1 - e) * nls(x) + e * nls(-x)


def logprob(data: Numbers, answer: int, name: str = "policy") -> float:
    return sum(data.tokens(name, answer))


def mean_logprob(data: Numbers, answer: int) -> float:
    return logprob(data, answer) / LENGTHS[answer]


def ratio(data: Numbers, answer: int) -> float:
    return logprob(data, answer) - logprob(data, answer, "reference")


def cut_ratio(data: Numbers, answer: int, other: int, s: Any) -> tuple[float, float]:
    """LD-DPO: log ratio and log-probability with the tail beyond the other answer's length weighted."""
    if s.ld_alpha is None:
        return ratio(data, answer), logprob(data, answer)

    def weighted(name: str) -> float:
        values, shared = data.tokens(name, answer), min(LENGTHS[answer], LENGTHS[other])
        return sum(values[:shared]) + s.ld_alpha * sum(values[shared:])

    reference = weighted("reference") if s.ld_reference else logprob(data, answer, "reference")
    return weighted("policy") - reference, weighted("policy")


def pair_ratios(data: Numbers, s: Any) -> list[tuple[float, float]]:
    return [(cut_ratio(data, win, lose, s)[0], cut_ratio(data, lose, win, s)[0]) for win, lose in PAIRED]


def score(r: float, s: Any) -> float:
    t = math.exp(r)
    return {
        "reverse_kl": lambda: math.log(t),
        "forward_kl": lambda: 1 - 1 / t,
        "js_divergence": lambda: math.log(2 * t / (t + 1)),
        "alpha_divergence": lambda: (t ** (s.f_alpha - 1) - 1) / (s.f_alpha - 1),
    }[s.f_divergence]()


def wpo(data: Numbers, s: Any) -> list[float]:
    def aligned(answer: int) -> float:
        pairs = zip(data.tokens("policy", answer), data.tokens("collision", answer), strict=True)
        return math.exp(sum(p - c for p, c in pairs) / LENGTHS[answer])

    return [aligned(win) * aligned(lose) if s.policy_weighting else 1.0 for win, lose in PAIRED]


def margins(data: Numbers, s: Any) -> list[float]:
    return [score(rw, s) - score(rl, s) for rw, rl in pair_ratios(data, s)]


def mean_margins(data: Numbers, s: Any) -> list[float]:
    return [
        score(rw, s) / LENGTHS[win] - score(rl, s) / LENGTHS[lose]
        for (rw, rl), (win, lose) in zip(pair_ratios(data, s), PAIRED, strict=True)
    ]


def dpo(data: Numbers, s: Any) -> list[float]:
    terms = zip(margins(data, s), wpo(data, s), strict=True)
    return [g * smoothed(s.beta * d, s.label_smoothing) for d, g in terms]


def hinge(data: Numbers, s: Any) -> list[float]:
    return [max(0.0, 1 - s.beta * d) for d in margins(data, s)]


def ipo(data: Numbers, s: Any) -> list[float]:
    used = mean_margins(data, s) if s.length == "mean" else margins(data, s)
    return [(d - 1 / (2 * s.beta)) ** 2 for d in used]


def sigmoid_norm(data: Numbers, s: Any) -> list[float]:
    return [nls(s.beta * d) for d in mean_margins(data, s)]


def exo_pair(data: Numbers, s: Any) -> list[float]:
    """KL of (q, 1 - q) to (1 - e, e)."""
    losses = []
    for d in margins(data, s):
        q, e = sigmoid(s.beta * d), s.label_smoothing
        losses.append(q * math.log(q / (1 - e)) + (1 - q) * math.log((1 - q) / e))
    return losses


def nca_pair(data: Numbers, s: Any) -> list[float]:
    return [
        nls(s.beta * rw) + 0.5 * nls(-s.beta * rw) + 0.5 * nls(-s.beta * rl)
        for rw, rl in pair_ratios(data, s)
    ]


def robust(data: Numbers, s: Any) -> list[float]:
    e = s.label_smoothing
    return [((1 - e) * nls(s.beta * d) - e * nls(-s.beta * d)) / (1 - 2 * e) for d in margins(data, s)]


def bco_pair(data: Numbers, s: Any) -> list[float]:
    return [nls(s.beta * rw) + nls(-s.beta * rl) for rw, rl in pair_ratios(data, s)]


def sppo_hard(data: Numbers, s: Any) -> list[float]:
    return [(rw - 0.5 / s.beta) ** 2 + (rl + 0.5 / s.beta) ** 2 for rw, rl in pair_ratios(data, s)]


def _transport(first: list[float], second: list[float], s: Any) -> list[float]:
    """Half of each of the two comparisons that a pair takes part in."""
    losses = [0.0] * len(first)
    by_first = sorted(range(len(first)), key=first.__getitem__)
    by_second = sorted(range(len(second)), key=second.__getitem__)
    for i, j in zip(by_first, by_second, strict=True):
        compared = smoothed(s.beta * (first[i] - second[j]), s.label_smoothing)
        losses[i] += compared / 2
        losses[j] += compared / 2
    return losses


def aot(data: Numbers, s: Any) -> list[float]:
    policy = [logprob(data, win) - logprob(data, lose) for win, lose in PAIRED]
    reference = [logprob(data, win, "reference") - logprob(data, lose, "reference") for win, lose in PAIRED]
    return _transport(policy, reference, s)


def aot_unpaired(data: Numbers, s: Any) -> list[float]:
    return _transport([rw for rw, _ in pair_ratios(data, s)], [rl for _, rl in pair_ratios(data, s)], s)


def apo_zero(data: Numbers, s: Any) -> list[float]:
    return [1 - sigmoid(s.beta * rw) + sigmoid(s.beta * rl) for rw, rl in pair_ratios(data, s)]


def apo_down(data: Numbers, s: Any) -> list[float]:
    return [sigmoid(s.beta * rw) + 1 - sigmoid(s.beta * (rw - rl)) for rw, rl in pair_ratios(data, s)]


def discopop(data: Numbers, s: Any) -> list[float]:
    losses = []
    for d in margins(data, s):
        x = s.beta * d
        mix = sigmoid(x / s.tau)
        losses.append(nls(x) * (1 - mix) + math.exp(-x) * mix)
    return losses


def dpop(data: Numbers, s: Any) -> list[float]:
    return [nls(s.beta * (rw - rl - s.penalty * max(0.0, -rw))) for rw, rl in pair_ratios(data, s)]


def beta_dpo(data: Numbers, s: Any) -> list[float]:
    gaps = [rw - rl for rw, rl in pair_ratios(data, s)]
    mean = s.beta * sum(gaps) / len(gaps)
    losses = []
    for gap in gaps:
        judged = mean if s.level == "batch" else s.beta * gap
        beta = max(s.min_beta, s.beta * (1 + s.alpha * (judged - MARGIN_CENTER)))
        losses.append(nls(beta * gap))
    return losses


def entropies(data: Numbers, answers: list[int], average: str) -> list[float]:
    mean_length = sum(LENGTHS[answer] for answer in answers) / len(answers)
    return [
        -logprob(data, answer) / (mean_length if average == "token" else LENGTHS[answer])
        for answer in answers
    ]


def slic_hf(data: Numbers, s: Any) -> list[float]:
    ranking = [max(0.0, s.margin - logprob(data, win) + logprob(data, lose)) for win, lose in PAIRED]
    terms = zip(ranking, entropies(data, CHOSEN, s.sft_average), strict=True)
    return [rank + s.sft_weight * entropy for rank, entropy in terms]


def tdpo1(data: Numbers, s: Any) -> list[float]:
    return [
        nls(
            s.beta * (ratio(data, win) - ratio(data, lose))
            - s.beta * (logprob(data, lose, "kl") - logprob(data, win, "kl"))
        )
        for win, lose in PAIRED
    ]


def tdpo2(data: Numbers, s: Any) -> list[float]:
    return [
        nls(
            s.beta * (ratio(data, win) - ratio(data, lose))
            - s.alpha * s.beta * (logprob(data, lose, "kl") - logprob(data, win, "kl"))
        )
        for win, lose in PAIRED
    ]


def cringe(data: Numbers, s: Any) -> list[float]:
    losses = []
    for win, lose in PAIRED:
        rivals = zip(data.tokens("contrast", lose), data.tokens("policy", lose), strict=True)
        contrast = (
            sum(-math.log(math.exp(c) / (math.exp(c) + math.exp(p))) for c, p in rivals) / LENGTHS[lose]
        )
        gate = 1.0
        if s.gate_temperature is not None:
            gate = sigmoid((s.gate_bias - logprob(data, win) + logprob(data, lose)) / s.gate_temperature)
        losses.append(gate * (-mean_logprob(data, win) + s.weight * contrast))
    return losses


def r_dpo(data: Numbers, s: Any) -> list[float]:
    return [
        smoothed(s.beta * d + s.alpha * (LENGTHS[win] - LENGTHS[lose]), s.label_smoothing)
        for d, (win, lose) in zip(margins(data, s), PAIRED, strict=True)
    ]


def sampo(data: Numbers, s: Any) -> list[float]:
    def sampled(answer: int, count: int) -> float:
        columns = (data.tokens(name, answer) for name in ("draw", "policy", "reference"))
        return sum(p - q for _, p, q in sorted(zip(*columns, strict=True))[:count])

    losses = []
    for win, lose in PAIRED:
        count = min(LENGTHS[win], LENGTHS[lose])
        losses.append(nls(s.beta * (sampled(win, count) - sampled(lose, count))))
    return losses


def shaped(x: float, alpha: float) -> float:
    return x if alpha == 0 else (1 - math.exp(x) ** -alpha) / alpha


def simpo(data: Numbers, s: Any) -> list[float]:
    losses = []
    for (win, lose), entropy in zip(PAIRED, entropies(data, CHOSEN, s.sft_average), strict=True):
        gap = shaped(mean_logprob(data, win), s.alpha) - shaped(mean_logprob(data, lose), s.alpha)
        losses.append(smoothed(s.beta * gap - s.gamma, s.label_smoothing) + s.sft_weight * entropy)
    return losses


def cpo(data: Numbers, s: Any) -> list[float]:
    value = mean_logprob if s.loss == "ipo" else logprob
    losses = []
    for (win, lose), entropy in zip(PAIRED, entropies(data, CHOSEN, s.sft_average), strict=True):
        gap = shaped(value(data, win), s.alpha) - shaped(value(data, lose), s.alpha)
        loss = {
            "sigmoid": smoothed(s.beta * gap, s.label_smoothing),
            "hinge": max(0.0, 1 - s.beta * gap),
            "ipo": (gap - 0.5 / s.beta) ** 2,
        }[s.loss]
        losses.append(loss + s.sft_weight * entropy)
    return losses


def orpo(data: Numbers, s: Any) -> list[float]:
    sums, lengths = [logprob(data, win) for win in CHOSEN], [LENGTHS[win] for win in CHOSEN]
    if s.sft_on == "prompt_and_answer":
        sums = [a + float(data.prompt_sum.detach()[win]) for a, win in zip(sums, CHOSEN, strict=True)]
        lengths = [a + PROMPT_LENGTHS[win] for a, win in zip(lengths, CHOSEN, strict=True)]
    losses = []
    for index, (win, lose) in enumerate(PAIRED):
        odds = [math.exp(mean_logprob(data, each)) for each in (win, lose)]
        odds = [p / (1 - p) for p in odds]
        count = sum(lengths) / len(lengths) if s.sft_average == "token" else lengths[index]
        losses.append(-sums[index] / count + s.beta * nls(math.log(odds[0] / odds[1])))
    return losses


def opa_dpo(data: Numbers, s: Any) -> list[float]:
    losses = []
    for win, lose, a in zip(CHOSEN, REJECTED, ALTERED, strict=True):
        rw, rl, ra = (s.beta * ratio(data, each) for each in (win, lose, a))
        if s.anchor_loss == "sigmoid":
            anchors = [nls(rw - s.anchor), nls(s.anchor - rl), nls(s.anchor - ra)]
        else:
            anchors = [(each - s.anchor) ** 2 for each in (rw, rl, ra)]
        weights = (s.anchor_weight, s.rejected_anchor_weight, s.altered_anchor_weight)
        anchored = sum(weight * anchor for weight, anchor in zip(weights, anchors, strict=True))
        losses.append(nls(rw - rl) + s.conditional_weight * nls(rw - ra) + anchored)
    return losses


def kto(data: Numbers, s: Any, point: float = KL) -> list[float]:
    return [
        s.desirable_weight * (1 - sigmoid(s.beta * (ratio(data, y) - point)))
        if good
        else s.undesirable_weight * (1 - sigmoid(s.beta * (point - ratio(data, y))))
        for y, good in zip(SINGLES, VERDICTS, strict=True)
    ]


def apo_zero_unpaired(data: Numbers, s: Any) -> list[float]:
    return kto(data, s, point=0.0)


def bco(data: Numbers, s: Any) -> list[float]:
    """The running mean of rewards under test is that of the case."""
    return [
        nls((1 if good else -1) * (s.beta * ratio(data, y) - RUNNING_MEAN))
        for y, good in zip(SINGLES, VERDICTS, strict=True)
    ]


def npo(data: Numbers, s: Any) -> list[float]:
    kept = [y for y, good in zip(SINGLES, VERDICTS, strict=True) if good]
    retained = dict(zip(kept, entropies(data, kept, s.sft_average), strict=True))
    return [
        s.retain_weight * retained[y]
        if good
        else 2 / s.beta * math.log(1 + math.exp(ratio(data, y)) ** s.beta)
        for y, good in zip(SINGLES, VERDICTS, strict=True)
    ]


def dro(data: Numbers, s: Any) -> list[float]:
    return [
        0.5 * (reward - float(data.value.detach()[y]) - s.tau * ratio(data, y)) ** 2
        for y, reward in zip(SINGLES, SINGLE_SCORES, strict=True)
    ]


def lipo_lambda(data: Numbers, s: Any) -> list[float]:
    losses = []
    for row, scores in zip(LISTS, LIST_SCORES, strict=True):
        rewards = [s.beta * ratio(data, y) for y in row]
        order = sorted(rewards, reverse=True)
        discount = [math.log(1 + order.index(reward) + 1) for reward in rewards]
        loss = 0.0
        for i in range(len(row)):
            for j in range(len(row)):
                if scores[i] > scores[j]:
                    weight = abs(2 ** scores[i] - 2 ** scores[j]) * abs(1 / discount[i] - 1 / discount[j])
                    loss += weight * math.log(1 + math.exp(-(rewards[i] - rewards[j])))
        losses.append(loss)
    return losses


def pro(data: Numbers, s: Any) -> list[float]:
    losses = []
    for row, scores, best in zip(LISTS, LIST_SCORES, best_answers(), strict=True):
        ranked = sorted(zip(scores, [mean_logprob(data, y) for y in row], strict=True), reverse=True)
        loss = 0.0
        for k in range(len(ranked) - 1):
            inverse = [ranked[k][0] - each[0] if s.dynamic_temperature else 1.0 for each in ranked[k + 1 :]]
            own = math.exp(ranked[k][1] * max(inverse))
            others = zip(ranked[k + 1 :], inverse, strict=True)
            loss -= math.log(own / (own + sum(math.exp(each[1] * u) for each, u in others)))
        losses.append(loss + s.sft_weight * (len(row) - 1) ** 2 * -mean_logprob(data, best))
    return losses


def rrhf(data: Numbers, s: Any) -> list[float]:
    best = entropies(data, best_answers(), s.sft_average)
    losses = []
    for row, scores, entropy in zip(LISTS, LIST_SCORES, best, strict=True):
        means = [mean_logprob(data, y) for y in row]
        loss = 0.0
        for i in range(len(row)):
            for j in range(len(row)):
                if scores[i] < scores[j]:
                    loss += max(0.0, means[i] - means[j])
        losses.append(loss + s.sft_weight * entropy)
    return losses


def plackett_luce_of(values: list[float], scores: list[float]) -> float:
    ranked = [value for _, value in sorted(zip(scores, values, strict=True), reverse=True)]
    return sum(
        -math.log(math.exp(ranked[k]) / sum(math.exp(each) for each in ranked[k:]))
        for k in range(len(ranked))
    )


def dpo_plackett_luce(data: Numbers, s: Any) -> list[float]:
    return [
        plackett_luce_of([s.beta * ratio(data, y) for y in row], scores)
        for row, scores in zip(LISTS, LIST_SCORES, strict=True)
    ]


def d2o(data: Numbers, s: Any) -> list[float]:
    losses = []
    for row, scores in zip(LISTS, LIST_SCORES, strict=True):
        negative = row[scores.index(min(scores))]
        samples = [ratio(data, y) for y in row if y != negative]
        losses.append(nls(s.beta / len(samples) * sum(samples) - s.alpha * ratio(data, negative)))
    return losses


def sppo_soft(data: Numbers, s: Any) -> list[float]:
    return [
        sum((ratio(data, y) - (c - 0.5) / s.beta) ** 2 for y, c in zip(row, scores, strict=True))
        for row, scores in zip(LISTS, LIST_SCORES, strict=True)
    ]


def sft(data: Numbers, s: Any) -> list[float]:
    return entropies(data, CHOSEN, s.average)


def bradley_terry(data: Numbers, s: Any) -> list[float]:
    x = data.score.tolist()
    return [
        nls(x[win] - x[lose] - margin) + s.centering * (x[win] + x[lose]) ** 2
        for (win, lose), margin in zip(PAIRED, MARGINS, strict=True)
    ]


def plackett_luce(data: Numbers, s: Any) -> list[float]:
    x = data.score.tolist()
    return [
        plackett_luce_of([x[y] for y in row], scores) for row, scores in zip(LISTS, LIST_SCORES, strict=True)
    ]


def regression(data: Numbers, s: Any) -> list[float]:
    x = data.score.tolist()
    return [(x[y] - target) ** 2 for y, target in zip(SINGLES, SINGLE_SCORES, strict=True)]


def process(data: Numbers, s: Any) -> list[float]:
    losses = []
    for answer in range(3):
        steps = [k for k, each in enumerate(STEP_ANSWERS) if each == answer]
        losses.append(
            sum(
                -STEP_LABELS[k] * math.log(sigmoid(float(data.step_score[k])))
                - (1 - STEP_LABELS[k]) * math.log(1 - sigmoid(float(data.step_score[k])))
                for k in steps
            )
            / len(steps)
        )
    return losses


CLOSED_FORMS: dict[str, ClosedForm] = {
    "dpo": dpo,
    "hinge": hinge,
    "ipo": ipo,
    "exo_pair": exo_pair,
    "nca_pair": nca_pair,
    "robust": robust,
    "bco_pair": bco_pair,
    "sppo_hard": sppo_hard,
    "aot": aot,
    "aot_unpaired": aot_unpaired,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "discopop": discopop,
    "sigmoid_norm": sigmoid_norm,
    "dpop": dpop,
    "beta_dpo": beta_dpo,
    "slic_hf": slic_hf,
    "tdpo1": tdpo1,
    "tdpo2": tdpo2,
    "cringe": cringe,
    "r_dpo": r_dpo,
    "sampo": sampo,
    "ld_dpo": dpo,
    "simpo": simpo,
    "cpo": cpo,
    "orpo": orpo,
    "opa_dpo": opa_dpo,
    "kto": kto,
    "apo_zero_unpaired": apo_zero_unpaired,
    "bco": bco,
    "npo": npo,
    "dro": dro,
    "lipo_lambda": lipo_lambda,
    "pro": pro,
    "rrhf": rrhf,
    "dpo_plackett_luce": dpo_plackett_luce,
    "d2o": d2o,
    "sppo_soft": sppo_soft,
    "sft": sft,
    "bradley_terry": bradley_terry,
    "plackett_luce": plackett_luce,
    "regression": regression,
    "process": process,
}
