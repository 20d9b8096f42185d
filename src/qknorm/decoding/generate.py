"""A language model that writes: characters in, characters out, one after another."""

from collections.abc import Iterator, Sequence

import torch
from pydantic import ValidationError

from qknorm.config import Generation, explain_validation
from qknorm.decoding.sampling import choose
from qknorm.errors import InputError
from qknorm.models.language_model import LanguageModel
from qknorm.text.characters import Characters


class SlidingReader:
    """Feeds a model one token after another through its cache, and reads on where its context ends.

    When the context is full the cache is thrown away and the last half of the context is read anew, from position 0:
    so the model always sees between a half and all of its context, with learned and with rotary positions alike, and
    reading anew costs little for each token.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._model, self._context = model, model.settings.context
        self._device = next(model.parameters()).device
        self._cache = model.new_cache()
        self._seen: list[int] = []

    def read(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits (vocabulary) of the token after these, which follow on what was read before."""
        self._seen = [*self._seen, *ids][-self._context :]
        unread = list(ids)
        if self._cache[0].length + len(unread) > self._context:
            self._cache = self._model.new_cache()
            unread = self._seen[-max(1, self._context // 2) :]
        logits: torch.Tensor = self._model(torch.tensor([unread], device=self._device), self._cache)
        return logits[0, -1]


class TextGenerator:
    """A trained language model with its characters: `generate` is all most people need."""

    def __init__(
        self,
        model: LanguageModel,
        characters: Characters,
        settings: Generation,
        *,
        precision: torch.dtype = torch.float32,
    ) -> None:
        self.model, self.characters, self.settings, self.precision = model.eval(), characters, settings, precision

    def generate(self, prompt: str = "", **options: object) -> str:
        """The prompt and what the model writes after it; options are those of `stream`."""
        return prompt + "".join(self.stream(prompt, **options))  # type: ignore[arg-type]

    def stream(
        self,
        prompt: str = "",
        *,
        length: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
    ) -> Iterator[str]:
        """What the model writes after the prompt, one character after another; the same for the same seed.

        Without a prompt it starts as if after the end of a line. What is not given is as the run's settings say.
        """
        asked = {"length": length, "temperature": temperature, "top_k": top_k, "top_p": top_p}
        settings = self._settings_with({name: value for name, value in asked.items() if value is not None})
        if not 0 <= seed < 2**63:
            raise InputError(f"a seed is a whole number from 0 on and below 2^63, not {seed}")
        start = "\n" if "\n" in self.characters.characters else self.characters.characters[0]
        ids = self.characters.encode(prompt or start).tolist()
        return self._write(ids, settings, torch.Generator().manual_seed(seed))

    def _settings_with(self, asked: dict[str, object]) -> Generation:
        try:
            return Generation.model_validate({**self.settings.model_dump(), **asked})
        except ValidationError as error:
            raise InputError(explain_validation(error, "generate", Generation)) from None

    def _write(self, ids: list[int], settings: Generation, generator: torch.Generator) -> Iterator[str]:
        reader, device = SlidingReader(self.model), next(self.model.parameters()).device
        unread = ids[-self.model.settings.context :]
        for _ in range(settings.length):
            # not around the whole loop: whoever reads a stream goes on with their own computations in between
            with (
                torch.no_grad(),
                torch.autocast(device.type, dtype=self.precision, enabled=self.precision != torch.float32),
            ):
                token = choose(
                    reader.read(unread),
                    temperature=settings.temperature,
                    top_k=settings.top_k,
                    top_p=settings.top_p,
                    generator=generator,
                )
            unread = [int(token)]
            yield self.characters.decode(unread)
