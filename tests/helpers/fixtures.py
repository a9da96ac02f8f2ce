"""Small checkpoint folders: weights, config, and tokenizer or image processor."""

import json
import string

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from symmerge.cli import app
from symmerge.lab.small_models import small_model

SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
CHARACTERS = string.ascii_letters + string.digits + " .,\n"
MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.25, 0.5]


def run(*arguments, expect=0):
    """Run a verb as from the command line; it must end with this exit code."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == expect, (result.exit_code, result.output, result.exception)
    return result


class Counted(list):
    """Batches that count how often they are fetched."""

    fetched = 0

    def __iter__(self):
        for batch in super().__iter__():
            self.fetched += 1
            yield batch


def tokenizer(vocabulary=101):
    """One token per character; classifiers get their special tokens."""
    known = {
        token: number for number, token in enumerate([*SPECIAL.values(), *CHARACTERS][:vocabulary])
    }
    backend = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    pair = [("[CLS]", known["[CLS]"]), ("[SEP]", known["[SEP]"])]
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=pair
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **SPECIAL,
    )


def checkpoint(folder, name, *, seed=0, **changes):
    """A small model in a folder, with all that tasks need."""
    model = small_model(name, seed=seed, **changes)
    model.save_pretrained(folder)
    if model.main_input_name == "pixel_values":
        side = model.config.image_size
        processor = {
            "image_processor_type": "ViTImageProcessor",
            "size": {"height": side, "width": side},
            "image_mean": MEAN,
            "image_std": STD,
        }
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    else:
        tokenizer().save_pretrained(folder)
    return folder
