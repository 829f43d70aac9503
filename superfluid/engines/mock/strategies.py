"""Strategy registration and certificates of the mock; registration fails closed."""

from copy import copy
from typing import NoReturn

import attrs

from superfluid.engines.engine import EngineError
from superfluid.engines.mock.config import MockConfig
from superfluid.link import linkw
from superfluid.link.codes import Sampling, Status

CAPABILITY_KINDS = range(1, 6)  # linear, block, tree, ancestor mask, host compatible
HOST_COMPATIBLE = 5
NO_CERTIFICATE_CLASS = 2  # of a lane without a strategy
NONE_DOMAIN, GREEDY_ONLY, PENALTY_FREE, ANY = range(4)


@attrs.define
class _Slot:
    registration: linkw.StrategyRegister
    grant: linkw.StrategyGrantOk


class Strategies:
    def __init__(self, config: MockConfig) -> None:
        self._config = config
        self._slots: dict[int, _Slot] = {}
        self._certified: dict[str, tuple[bytes, bytes]] = {}  # strategy id: the hashes its certificates belong to
        self._next_cert = 1

    def register(self, registration: linkw.StrategyRegister) -> linkw.StrategyGrantOk:
        """Raises EngineError -128."""
        self._check(registration)
        hashes = (registration.impl_hash, registration.config_hash)
        for slot in self._slots.values():
            known = slot.registration
            if (known.strategy_id, known.impl_hash, known.config_hash) == (registration.strategy_id, *hashes):
                slot.registration = registration
                return slot.grant
        certificates = []
        if self._certified.setdefault(registration.strategy_id, hashes) == hashes:
            for certificate in self._config.certificates.get(registration.strategy_id, ()):
                certificates.append(copy(certificate))
                certificates[-1].cert_id = self._next_cert
                self._next_cert += 1
        grant = linkw.StrategyGrantOk(len(self._slots) + 1, certificates)
        self._slots[grant.strategy_slot] = _Slot(registration, grant)
        return grant

    def check_slot(self, number: int, host: bool) -> None:
        """Raises EngineError -106 for an unknown slot, -110 for a host lane on a strategy that cannot serve one."""
        if not number:
            return
        slot = self._slots.get(number)
        if slot is None:
            raise EngineError(Status.RejectIllegalCombination, f"no strategy slot {number}")
        if host and HOST_COMPATIBLE not in {need.kind_id for need in slot.registration.capabilities}:
            raise EngineError(Status.RejectHostRules, f"strategy slot {number} is not host compatible")

    def certificate(self, admit: linkw.LaneAdmit) -> tuple[linkw.ExactnessCert | None, int]:
        """The certificate of highest exactness that an admit may run under, and the code that refuses it alone."""
        if not admit.strategy_slot:
            return None, 0
        offered = self._slots[admit.strategy_slot].grant.certificates
        fitting = [certificate for certificate in offered if _fits(certificate, admit)]
        if fitting:
            return max(fitting, key=lambda certificate: certificate.exactness), 0
        return None, 0 if admit.allow_approximate else Status.RejectCertUnmatched

    def _check(self, registration: linkw.StrategyRegister) -> None:
        config = self._config
        for need in registration.capabilities:
            if need.kind_id not in CAPABILITY_KINDS:
                _refuse(f"capability kind {need.kind_id} is unknown")
        for tap in registration.taps:
            if tap.layer >= config.tap_layers:
                _refuse(f"a tap at layer {tap.layer} of {config.tap_layers}")
        if registration.target_archs and config.architecture not in registration.target_archs:
            _refuse(f"made for {', '.join(registration.target_archs)}; the model is {config.architecture}")
        if lacking := registration.kernel_caps_required & ~config.kernel_caps:
            _refuse(f"kernel capabilities {lacking:#x} are missing")


def _fits(certificate: linkw.ExactnessCert, admit: linkw.LaneAdmit) -> bool:
    params = admit.params
    penalties = params.freq_penalty != 0 or params.presence_penalty != 0 or params.repeat_penalty not in (0.0, 1.0)
    domain = {
        GREEDY_ONLY: params.temperature <= 0 and not penalties,
        PENALTY_FREE: not penalties,
        ANY: True,
    }
    if admit.required_cert_id not in (0, certificate.cert_id):
        return False
    if not certificate.sampling_modes & 1 << admit.sampling:
        return False
    if admit.sampling == Sampling.HOST and (
        not any(admit.host_sampler_identity)
        or admit.host_sampler_identity not in certificate.admissible_host_identities
    ):
        return False
    return (
        domain.get(certificate.param_domain, False)
        and (certificate.grammar_allowed or not admit.grammar_handle)
        and (certificate.logit_bias_allowed or not admit.logit_bias_handle)
        and certificate.exactness >= admit.minimum_exactness
    )


def _refuse(reason: str) -> NoReturn:
    raise EngineError(Status.RegistrationRefused, reason)
