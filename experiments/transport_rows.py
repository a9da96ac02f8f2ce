"""The rows of transport.py: every way to give OTHER what TUNED learned, and the controls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transport_settings import Rows, Setting, low_rank, module_of, scores, take, trained

LABELLED = 32  # inputs with labels, of the controls that use them
MASK_SCALES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
DATA_ROWS = 2000  # inputs of the new domain without labels, of the rows "-data"


class Cells:
    """Everything that the rows of one ordered pair share."""

    def __init__(
        self,
        setting: Setting,
        models: tuple[Any, Any, Any],
        rows: dict[str, Rows],
        options: Any,
        adapter: Any = None,
    ) -> None:
        self.base, self.tuned, self.other = models
        self.setting, self.rows, self.options, self.adapter = setting, rows, options, adapter
        self.passages: dict[str, Any] = {}
        self.device, self.labelled = options.device, _first(rows["train"], LABELLED)

    def start(self) -> Any:
        """OTHER before anything arrives: of another class than TUNED, with a head of zeros."""
        return self.passage("unaligned").other

    def passage(self, name: str) -> Any:
        from symmerge.transporting.heads import has_more, headed

        if name not in self.passages:
            passage = self._found(name)
            if has_more(self.base, self.tuned):
                passage = headed(passage, self.tuned)
            self.passages[name] = passage
        return self.passages[name]

    def _found(self, name: str) -> Any:
        import symmerge as sm
        from symmerge.models.alignment import Alignment
        from symmerge.transporting.frames import Passage, framed

        if name == "unaligned":
            still = Alignment.identity(framed(self.base).spec)
            return Passage(self.base, self.other, still, ())
        if name == "random":
            generator = torch.Generator().manual_seed(5)
            moved = Alignment.random(framed(self.base).spec, generator)
            return Passage(self.base, self.other, moved, ())
        names = {"weights": "fast", "midpoint": "standard"}
        name = names.get(name, name)
        kind = "effort" if name in ("fast", "standard") else "recipe"
        method = sm.AlignOptions(**{kind: name}, device=self.device)
        return Passage.of(sm.align(self.base, self.other, method))

    def model(self, row: str) -> Any:
        """The model of a row; `ROW+heal` goes on from there, in all weights or all factors."""
        if row == "heal":
            return self._healed(self.start(), self.tuned)
        row, _, heals = row.partition("+")
        if row.startswith("lora-"):
            return self._low_rank(row.removeprefix("lora-"), bool(heals))
        model = self._unhealed(row)
        return self._healed(model, self.tuned) if heals else model

    def _healed(self, model: Any, tuned: Any, adapter: Any = None) -> Any:
        """All weights learn TUNED's answers on what it writes, or the factors of an adapter."""
        from symmerge.merging.healing import HealOptions
        from symmerge.transporting.healing import heal_adapter, heal_carried

        data = self._written("standard")
        how = HealOptions(steps=self.options.heal_steps, data=data, device=self.device)
        if adapter is None:
            return heal_carried(model, tuned, how).model
        return heal_adapter(model, adapter, tuned, how).adapter

    def _unhealed(self, row: str) -> Any:
        special = {"masks": self._masks, "labelled": self._labelled}
        if row in special:
            return special[row]()
        name, _, scale = row.partition(":")
        if name in ("unaligned", "random", "permutations", "weights", "midpoint"):
            return _carried(self.passage(name), self.tuned, float(scale or 1))
        result = self._learned(name, self.tuned)
        return _carried(result.passage, self.tuned, result.scales)

    def _low_rank(self, row: str, heals: bool) -> Any:
        from symmerge.transporting.adapters import adapted, carried_adapter

        tuned = adapted(self.base, self.adapter)
        if row in ("weights", "unaligned"):
            moved = carried_adapter(self.passage(row), self.adapter)
        else:
            result = self._learned(row, tuned, by_module=True)
            moved = carried_adapter(result.passage, self.adapter, result.scales)
        moved = self._healed(self.other, tuned, moved) if heals else moved
        return adapted(self.other, moved)

    def _learned(self, row: str, tuned: Any, **how: Any) -> Any:
        from symmerge.transporting.learning import learn_passage

        start = row.removeprefix("learned-") if row.startswith("learned-") else "weights"
        effort = "standard" if row.startswith("learned-") else row.removesuffix("-data")
        steps = self.options.steps or (self.options.best_steps if effort == "best" else None)
        data = self._inputs() if row.endswith("-data") else self._written(effort)
        how |= {"effort": effort, "steps": steps, "device": self.device, "data": data}
        if self.options.verbose:
            how["progress"] = lambda line: print("   ", line, flush=True)
        return learn_passage(self.passage(start), tuned, **how)

    def _written(self, effort: str) -> Any:
        """What a classifier of texts learns from: OTHER's base writes it."""
        from symmerge.transporting.inputs import written_texts

        if self.setting.classifier is None:
            return None
        samples = 64 if self.options.tiny else 8000 if effort == "best" else 2000
        return written_texts(self.tuned, self.base, samples=samples, device=self.device)

    def _inputs(self) -> Any:
        """Inputs of the new domain, without labels, as a task."""
        from symmerge.evaluation.tasks.base import Task, batched
        from symmerge.evaluation.tasks.readouts import ImageReadout, TokenReadout

        rows = _first(self.rows["train"], DATA_ROWS)
        language = rows["labels"].ndim == 2
        readout = TokenReadout(causal=True) if language else ImageReadout()
        kind = "clm" if language else "image" if "pixel_values" in rows else "text"

        def collate(samples: Any) -> Rows:
            chosen = torch.tensor([number for (number,) in samples])
            return {name: value[chosen] for name, value in rows.items()}  # one shape: one graph

        numbers = [(number,) for number in range(len(rows["labels"]))]
        size = 8 if language else 32
        batches = batched(numbers, size, key=lambda sample: sample[0], collate=collate)
        settings = {"block": rows["labels"].shape[1]} if language else {}
        return Task(kind, "the new domain", len(numbers), 0, readout, batches, settings)

    def _masks(self) -> Any:
        """The change by weights, where a step along it agrees with OTHER's own gradient."""
        from symmerge.checkpoints.weights import MemoryWeights

        moved, start = _carried(self.passage("weights"), self.tuned, 1.0), self.start()
        module = module_of(start, self.device)
        for parameter in module.parameters():
            parameter.requires_grad_(True)
        for index in torch.arange(LABELLED).split(8):
            module(**take(self.labelled, index, self.device)).loss.backward()
        named = dict(module.named_parameters(remove_duplicate=False))
        before = {name: start.weights[name] for name in start.spec.tensors}
        change = {name: moved.weights[name] - value for name, value in before.items()}
        kept = {name: d * (d * named[name].grad.cpu() < 0) for name, d in change.items()}
        models = [  # every entry goes downhill: at full size, far beyond
            replace(start, weights=MemoryWeights({n: before[n] + scale * kept[n] for n in kept}))
            for scale in MASK_SCALES
        ]
        return min(models, key=lambda model: scores(model, self.labelled, self.device)["loss"])

    def _labelled(self) -> Any:
        """OTHER fine-tuned on these; the best of two lengths, by inputs held out of training."""
        held = {name: value[-64:] for name, value in self.rows["train"].items()}
        how = {"seed": 1, "batch": 8}
        tried = [  # steps few enough not to learn them by heart
            trained(module_of(self.start(), self.device), self.labelled, self.device, **how, **one)
            for one in ({"steps": 20, "lr": 3e-4}, {"steps": 40, "lr": 5e-4})
        ]
        models = map(self._of, tried)
        return min(models, key=lambda model: scores(model, held, self.device)["loss"])

    def _of(self, module: Any) -> Any:
        from symmerge.checkpoints.weights import MemoryWeights

        start, named = self.start(), dict(module.named_parameters(remove_duplicate=False))
        tensors = {name: named[name].detach().cpu() for name in start.spec.tensors}
        return replace(start, weights=MemoryWeights(tensors))


def _first(rows: Rows, count: int) -> Rows:
    return {name: value[:count] for name, value in rows.items()}


def _carried(passage: Any, tuned: Any, scale: Any) -> Any:
    from symmerge.transporting.carrying import carried

    return carried(passage, tuned, scale)


def own_low_rank(setting: Setting, model: Any, rows: Rows, options: Any, seed: int) -> Any:
    """The adapter that a seed learns itself."""
    return low_rank(model, rows, setting, options.device, seed)
