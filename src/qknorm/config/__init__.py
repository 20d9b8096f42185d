"""The tree of settings, validated: every default of ours stands here and nowhere else."""

from qknorm.config.group import Settings
from qknorm.config.models import Attention, Dropout, LanguageModel, LanguageModelDropout, Model
from qknorm.config.preparing import Cleaning, Prepare, Subwords
from qknorm.config.toml import explain_validation, merge, read_settings, setting_names
from qknorm.config.training import (
    AnyTrain,
    Decoding,
    Generation,
    LanguageModelTraining,
    Optimisation,
    Schedule,
    Train,
    Training,
    TrainLanguageModel,
)

__all__ = [
    "AnyTrain",
    "Attention",
    "Cleaning",
    "Decoding",
    "Dropout",
    "Generation",
    "LanguageModel",
    "LanguageModelDropout",
    "LanguageModelTraining",
    "Model",
    "Optimisation",
    "Prepare",
    "Schedule",
    "Settings",
    "Subwords",
    "Train",
    "TrainLanguageModel",
    "Training",
    "explain_validation",
    "merge",
    "read_settings",
    "setting_names",
]
