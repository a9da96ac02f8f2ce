"""Self-generated text: language models sample their own inputs, so no data is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from symmerge.errors import OVERFLOW, DataError
from symmerge.models.model import Model
from symmerge.models.progress import Counted, Progress

FILLING_PASSES = 8  # of a masked model over a row of mask tokens; 32 gave nothing more
MASKING = 0.15  # share of tokens that are masked again at the end
# Keys and values of the rows that are sampled at once. A GPU waits for every token: the more rows,
# the better.
CACHE_BYTES, SHARE_OF_GPU = 1 << 30, 0.25  # on a processor; of what is free on a GPU
MAX_LOGITS = 1 << 28  # of a masked model at once: 1 GB
SEQ2SEQ = "seq2seq-lm"
TRAINED = ("max_position_embeddings", "n_positions", "max_seq_len")  # tokens at once in training
Tell = Callable[[int, int], None]  # tokens that are there, and their number in the end


@torch.no_grad()
def sample_text(
    model: Model,
    module: nn.Module,
    *,
    rows: int,
    length: int,
    seed: int,
    progress: Progress | None = None,
) -> Int[Tensor, "rows length"]:
    """Sample text from a language model; a masked one fills masks, a few positions at a time.

    Of an encoder-decoder, the second half of each row answers the first.
    """
    length = longest_text(model, length)
    masked = model.spec.task == "masked-lm"
    device = _device(module)
    size, sample = _rows_at_once(module, length, device), _continue
    if masked:
        size = max(1, MAX_LOGITS // (length * model.spec.sizes["vocabulary"]))
        sample = _fill_in
    elif model.spec.task == SEQ2SEQ:
        sample = _answer
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        starts = range(0, rows, size)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            texts = []
            for number, at in enumerate(starts):
                tell = _counted(progress, model, number, len(starts))
                texts.append(sample(model, module, min(size, rows - at), length, tell))
            return torch.cat(texts)


def longest_text(model: Model, length: int) -> int:
    """At most `length` tokens, and no more than the model has positions, or was trained with."""
    learned = model.spec.sizes.get("position", length + 2) - 2  # RoBERTa keeps two for itself
    trained = (model.config.get(field) for field in TRAINED)
    return min(length, learned, *(most for most in trained if isinstance(most, int)))


def text_inputs(model: Model, text: Int[Tensor, "rows length"]) -> dict[str, Tensor]:
    """How a model reads text: an encoder the first half, and its decoder the second.

    The decoder begins with its start token, so that each place predicts its own token.
    """
    if model.spec.task != SEQ2SEQ:
        return {"input_ids": text}
    given, answer = halves(text)
    start = answer.new_full((len(answer), 1), start_token(model))
    return {"input_ids": given, "decoder_input_ids": torch.cat([start, answer[:, :-1]], 1)}


def halves(text: Tensor) -> tuple[Tensor, Tensor]:
    """What an encoder reads of a text, and what a decoder answers."""
    middle = text.shape[1] // 2
    return text[:, :middle], text[:, middle:]


def start_token(model: Model) -> int:
    """The token that a decoder begins with."""
    fields = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    named = (model.config.get(field) for field in fields)
    vocabulary = model.spec.sizes["vocabulary"]
    return next((one for one in named if isinstance(one, int) and 0 <= one < vocabulary), 0)


def _counted(progress: Progress | None, model: Model, group: int, groups: int) -> Tell:
    """Report how much of all text is there, while one group of rows is sampled."""

    def tell(done: int, total: int) -> None:
        if progress:
            line = f"text of {model.where}: {done} of {total} tokens"
            progress(Counted(line, group * total + done, groups * total))

    return tell


def _rows_at_once(module: Any, length: int, device: torch.device) -> int:
    config, room = module.config, CACHE_BYTES
    if device.type == "cuda":
        room = int(SHARE_OF_GPU * torch.cuda.mem_get_info(device)[0])
    # As if every head had keys of its own.
    per_token = 2 * config.num_hidden_layers * config.hidden_size * torch.float32.itemsize
    return max(1, room // (per_token * length))


def _continue(model: Model, module: nn.Module, rows: int, length: int, tell: Tell) -> Tensor:
    """Sample token by token after the BOS token, or a random one where the config has none."""
    vocabulary, device = model.spec.sizes["vocabulary"], _device(module)
    first = model.config.get("bos_token_id")
    # A model with a smaller vocabulary may have kept GPT-2's id in its config.
    if first is None or not 0 <= first < vocabulary:
        tokens = torch.randint(0, vocabulary, (rows, 1), device=device)
    else:
        tokens = torch.full((rows, 1), first, device=device)
    from symmerge.evaluation.data.token_cache import reserved_cache  # transformers: not for pages

    cache, sane = reserved_cache(module.config, length), torch.ones((), device=device)
    text = [tokens]
    for done in range(1, length):
        output = module(input_ids=text[-1], past_key_values=cache, use_cache=True)
        logits = output.logits[:, -1]
        sane = sane * logits.isfinite().all()  # asked at the end: to ask is to wait for the GPU
        text.append(_drawn(logits.nan_to_num()))
        tell(done + 1, length)
    _check(model, bool(sane))
    return torch.cat(text, 1)


def _answer(model: Model, module: Any, rows: int, length: int, tell: Tell) -> Tensor:
    """A chain of answers, to random tokens first: what a decoder wrote its encoder reads next."""
    vocabulary, device = model.spec.sizes["vocabulary"], _device(module)
    given = torch.randint(0, vocabulary, (rows, length // 2), device=device)
    first = _decode(model, module, given, length // 2, lambda done, _: tell(done, length))
    rest = length - length // 2
    second = _decode(model, module, first, rest, lambda done, _: tell(length - rest + done, length))
    return torch.cat([first, second], 1)


def _decode(model: Model, module: Any, given: Tensor, length: int, tell: Tell) -> Tensor:
    """Sample what a decoder answers, token by token."""
    from symmerge.evaluation.data.token_cache import reserved_caches  # transformers: not for pages

    encoded, cache = module.get_encoder()(input_ids=given), reserved_caches(length)
    tokens = [given.new_full((len(given), 1), start_token(model))]
    sane = torch.ones((), device=given.device)
    for done in range(length):
        output = module(
            encoder_outputs=encoded,
            decoder_input_ids=tokens[-1],
            past_key_values=cache,
            use_cache=True,
        )
        logits = output.logits[:, -1]
        sane = sane * logits.isfinite().all()  # asked at the end: to ask is to wait for the GPU
        tokens.append(_drawn(logits.nan_to_num()))
        tell(done + 1, length)
    _check(model, bool(sane))
    return torch.cat(tokens[1:], 1)


def _fill_in(model: Model, module: nn.Module, rows: int, length: int, tell: Tell) -> Tensor:
    """Fill rows of masks in random order, then mask a share of the tokens again."""
    mask, device = mask_token(model), _device(module)
    tokens = torch.full((rows, length), mask, device=device)
    order = torch.rand(rows, length, device=device).argsort(1)
    done = 0
    for positions in order.split(max(1, length // FILLING_PASSES), 1):
        index = positions[..., None].expand(-1, -1, model.spec.sizes["vocabulary"])
        logits = first_logits(module(input_ids=tokens)).gather(1, index)
        _check(model, bool(logits.isfinite().all()))
        sampled = _drawn(logits.flatten(0, 1))
        tokens = tokens.scatter(1, positions, sampled.view_as(positions))
        done += positions.shape[1]
        tell(done, length)
    masked = torch.rand(rows, length, device=device) < MASKING
    return torch.where(masked, mask, tokens)


def _check(model: Model, finite: bool) -> None:
    if not finite:
        raise DataError(f"{model.where} cannot write text: in its logits, {OVERFLOW}")


def _drawn(logits: Float[Tensor, "rows vocabulary"]) -> Int[Tensor, "rows 1"]:
    return torch.multinomial(logits.float().softmax(-1), 1)


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def mask_token(model: Model) -> int:
    """The id of the mask token; 103, as in BERT, where no tokenizer names one."""
    # Here, because tasks import this module.
    from symmerge.evaluation.tasks.preprocessing import check_tokens, tokenizer_of

    if model.path is not None and any(file.name.startswith("tokenizer") for file in model.files):
        token = tokenizer_of(model).mask_token_id
        if token is not None:
            check_tokens(model, token)
            return int(token)
    return min(103, model.spec.sizes["vocabulary"] - 1)


def first_logits(output: Any) -> Tensor:
    """Logits of a stock model; of several heads, those of the first."""
    return next(value for key, value in output.items() if "logits" in key)
