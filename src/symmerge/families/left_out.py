"""Classes of transformers without a table, of model types that have one, and why."""

from __future__ import annotations

from collections.abc import Mapping

REASONS: Mapping[str, tuple[str, ...]] = {
    "several texts for each answer, which no input of the checks has yet": (
        "AlbertForMultipleChoice",
        "BertForMultipleChoice",
        "CamembertForMultipleChoice",
        "DebertaV2ForMultipleChoice",
        "DistilBertForMultipleChoice",
        "ElectraForMultipleChoice",
        "MPNetForMultipleChoice",
        "ModernBertForMultipleChoice",
        "RoFormerForMultipleChoice",
        "RobertaForMultipleChoice",
        "XLMRobertaForMultipleChoice",
    ),
    "shows the streams of chosen layers to a detector, which has its own table or none": (
        "BeitBackbone",
        "DINOv3ViTBackbone",
        "Dinov2Backbone",
        "Dinov2WithRegistersBackbone",
        "SwinBackbone",
    ),
    "guesses hidden patches: a part of training, of which few checkpoints are kept": (
        "BeitForMaskedImageModeling",
        "DeiTForMaskedImageModeling",
        "SwinForMaskedImageModeling",
        "ViTForMaskedImageModeling",
    ),
    "convolutions with batch norms, whose running statistics move with their channels": (
        "BeitForSemanticSegmentation",
    ),
}
"""Why -> the classes that are left out for it."""
LEFT_OUT: Mapping[str, str] = {name: why for why, names in REASONS.items() for name in names}
