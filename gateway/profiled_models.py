"""Names that profiles give, for all that lies behind the routes: found as folders are, and run as the profile says."""

from gateway.ports import Generator, KnownModel, ModelLookup
from gateway.profiles import Profile, Profiles, profile_of, profiled
from gateway.replies import Reply
from protocol.generation import Work
from protocol.ids import ModelName


class ProfiledModels:
    """Finds a folder by its name, or by one that stands for it."""

    def __init__(self, models: ModelLookup, profiles: Profiles) -> None:
        self._models = models
        self._profiles = profiles

    def find(self, name: str) -> KnownModel | None:
        """The folder's own entry, whose name is not the one asked for if a profile led to it."""
        profile = self.profile(name)
        return self._models.find(name if profile is None else profile.model)

    def profile(self, name: str) -> Profile | None:
        """What the name stands for, unless it is a folder's."""
        return profile_of(self._profiles, name, lambda known: self._models.find(known) is not None)


class ProfiledGenerator:
    """Runs work for a profile's name on the folder that it stands for. Work for a folder passes as it is."""

    def __init__(self, generator: Generator, models: ProfiledModels) -> None:
        self._generator = generator
        self._models = models

    def submit(self, model: ModelName, work: Work) -> Reply:
        """As `Generator.submit`."""
        profile = self._models.profile(model)
        if profile is None:
            return self._generator.submit(model, work)
        return self._generator.submit(ModelName(profile.model), profiled(profile, work))
