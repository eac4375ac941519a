"""Why a model's files cannot be used; with ModelNotFound and ModelFileMissing of `known_models` and UnknownArchitecture one tree."""

from tessera.values.known_models import ModelError


class ModelFileDamaged(ModelError):
    """A file is malformed, cut short, or lacks an entry it must have."""


class ModelUnsupported(ModelError):
    """The files are sound but ask for something this worker does not compute."""


class WeightMissing(ModelError):
    """The files lack weights which the model has."""


class WeightUnexpected(ModelError):
    """The files hold weights which the model has no place for."""


class WeightShapeMismatch(ModelError):
    """A weight's shape is not the one that the configuration implies."""


class DraftMismatch(ModelError):
    """A model cannot draft for another: their vocabularies differ, or it is too short."""
