"""The adapters of a recipe: every choice with its default, and the refusals that need no library and no weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from expertmesh.errors import ConfigError

ATTENTION, EXPERTS, SHARED_EXPERTS, ROUTER = "attention", "experts", "shared_experts", "router"
_LINEAR_LAYERS = (ATTENTION,)
TARGETS = (ATTENTION, EXPERTS, SHARED_EXPERTS, ROUTER)


@dataclass(frozen=True, kw_only=True)
class LoraRecipe:
    """Low-rank adapters. Annotations as in `Recipe`; names are PEFT's, without `lora_`."""

    r: Annotated[int, "rank of the adapters, of every expert's too"] = 16
    alpha: Annotated[int | None, "adapters are scaled by alpha / r; default: twice r"] = None
    targets: Annotated[
        list[str] | None, "any of attention, experts, shared_experts, router; default: the first two"
    ] = None
    target_modules: Annotated[list[str] | str | None, "instead of targets: PEFT's own, names of linear layers"] = None
    target_parameters: Annotated[list[str] | None, "instead of targets: PEFT's own, names of parameters"] = None
    modules_to_save: Annotated[list[str] | None, "modules that are trained whole, such as lm_head"] = None
    dropout: Annotated[float, "dropout before adapters of linear layers; PEFT has none for experts"] = 0.0
    use_rslora: Annotated[bool, "scale by alpha / sqrt(r)"] = False
    use_dora: Annotated[bool, "DoRA, on linear layers only"] = False

    @property
    def scaled_by(self) -> int:
        """PEFT's `lora_alpha`."""
        return 2 * self.r if self.alpha is None else self.alpha

    @property
    def names_layers(self) -> bool:
        """Whether it says in PEFT's words what is adapted."""
        return self.target_modules is not None or self.target_parameters is not None

    def validate(self) -> None:
        """Refuse what can be seen to fail without the model.

        Raises:
            ConfigError: says which key is wrong and what to change.
        """
        for name in ("r", "alpha"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"lora.{name} must be at least 1, but is {value}: correct it.")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"lora.dropout must be at least 0 and less than 1, but is {self.dropout}: correct it.")
        self._check_lists()
        self._check_parameters()

    def _check_lists(self) -> None:
        for name in ("targets", "target_modules", "target_parameters", "modules_to_save"):
            value = getattr(self, name)
            if value is not None and (not value or not all(isinstance(item, str) for item in value)):
                raise ConfigError(f"lora.{name} must be a list of names, but is {value!r}: correct it, or remove it.")
        if self.targets is not None and self.names_layers:
            raise ConfigError(
                "lora.targets and lora.target_modules or lora.target_parameters say the same thing: remove one."
            )
        for target in self.targets or ():
            if target not in TARGETS:
                raise ConfigError(
                    f"lora.targets {target!r} is unknown: choose among {', '.join(TARGETS)}, or give PEFT's "
                    f"target_modules and target_parameters."
                )

    def _check_parameters(self) -> None:
        """PEFT adds adapters of parameters to the weight itself, and so can do less with them than with layers."""
        if not self._adapts_parameters():
            return
        for name, needs in (("dropout", "set `dropout: 0`"), ("use_dora", "set `use_dora: false`")):
            if getattr(self, name):
                instead = "drop target_parameters" if self.names_layers else f"set `targets: [{ATTENTION}]`"
                raise ConfigError(f"lora.{name} works for linear layers only, not for experts: {needs}, or {instead}.")

    def _adapts_parameters(self) -> bool:
        if self.names_layers:
            return self.target_parameters is not None
        return self.targets is None or any(target not in _LINEAR_LAYERS for target in self.targets)
