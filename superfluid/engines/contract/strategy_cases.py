"""Strategies and media: what full engines do beside the executor's rules."""

from superfluid.engines.contract.cases import New, case
from superfluid.engines.contract.driver import Driver, need
from superfluid.link import linkw
from superfluid.link.codes import PARAM_IGNORE_EOS, AdmitStatus, FaultCode, Sampling, Status, TickStatus
from superfluid.link.linkw import CapabilityReq, ExactnessCert, LaneDecode, LanePrefill, TapSpec

HOST = b"\x11" * 32
HOST_COMPATIBLE = 5
IGNORE_EOS = PARAM_IGNORE_EOS


def _register(strategy_id: str, impl: int = 1, config: int = 1, **fields: object) -> linkw.StrategyRegister:
    hashes = (bytes([impl]) * 32, bytes([config]) * 32)
    return linkw.StrategyRegister(strategy_id, "1", *hashes, **fields)  # type: ignore[arg-type]


def _cert(exactness: int, modes: int = 7, domain: int = 3, grammar: bool = False, **fields: object) -> ExactnessCert:
    return ExactnessCert(0, exactness, modes, domain, grammar, False, 1, **fields)  # type: ignore[arg-type]


@case
def registration_fails_closed(new: New) -> None:
    d = new(certificates={})
    register = d.engine.strategy_register
    refused = Status.RegistrationRefused
    d.refuses(refused, "a capability of kind 77", register, _register("s", capabilities=[CapabilityReq(77, b"")]))
    d.refuses(refused, "a tap past the layers", register, _register("s", taps=[TapSpec(100_000, 1, 0, 0)]))
    d.refuses(refused, "another architecture", register, _register("s", target_archs=["no-such-architecture"]))
    d.refuses(refused, "a kernel capability", register, _register("s", kernel_caps_required=1 << 31))
    d.true(register(_register("s")).strategy_slot > 0, "a slot")


@case
def certificates_belong_to_what_was_certified(new: New) -> None:
    d = new(certificates={"s": [_cert(2)]})
    first = d.engine.strategy_register(_register("s"))
    d.equal(len(first.certificates), 1, "certificates of what is certified")
    d.true(first.certificates[0].cert_id > 0, "a certificate's id is not 0")
    for impl, config in ((2, 1), (1, 2)):
        other = d.engine.strategy_register(_register("s", impl, config))
        d.true(other.strategy_slot > 0, "a slot for the same id with other hashes")
        d.equal(other.certificates, [], "its certificates")
    again = d.engine.strategy_register(_register("s"))
    d.equal(len(again.certificates), 1, "certificates when registered again as certified")


@case
def the_certificate_of_an_admit(new: New) -> None:
    offered = [
        _cert(1),
        _cert(2, modes=1, domain=1, grammar=True),
        _cert(2, modes=2, domain=2),
        _cert(1, modes=4, admissible_host_identities=[HOST, bytes(32)]),
        _cert(0, domain=0),
    ]
    d = new(certificates={"s": offered})
    grant = d.engine.strategy_register(_register("s", capabilities=[CapabilityReq(HOST_COMPATIBLE, b"")]))
    any_mode, greedy, unpenalized, host, _never = (certificate.cert_id for certificate in grant.certificates)
    sampled = linkw.SamplingParams(temperature=0.8, flags=IGNORE_EOS)
    penalized = linkw.SamplingParams(presence_penalty=0.5, flags=IGNORE_EOS)
    repeat_one = linkw.SamplingParams(repeat_penalty=1.0, flags=IGNORE_EOS)
    for words, fields, expected in (
        ("greedy", {}, (greedy, 2)),
        ("greedy, repeat penalty 1", {"params": repeat_one}, (greedy, 2)),
        ("greedy with a penalty", {"params": penalized}, (any_mode, 1)),
        ("sampled", {"sampling": Sampling.SAMPLED, "params": sampled}, (unpenalized, 2)),
        ("a required certificate", {"required_cert_id": any_mode}, (any_mode, 1)),
        ("a minimum that is there", {"minimum_exactness": 2}, (greedy, 2)),
        ("host", {"sampling": Sampling.HOST, "host_sampler_identity": HOST}, (host, 1)),
        ("host, identity zero", {"sampling": Sampling.HOST}, None),
        ("host, another identity", {"sampling": Sampling.HOST, "host_sampler_identity": b"\x22" * 32}, None),
        ("a certificate of another mode", {"required_cert_id": unpenalized}, None),
        ("an unknown certificate", {"required_cert_id": 4711}, None),
        ("more exactness than there is", {"params": penalized, "minimum_exactness": 2}, None),
        ("the same, approximate allowed", {"minimum_exactness": 3, "allow_approximate": True}, (0, 0)),
    ):
        events = d.tick(admits=[d.admit(1, d.prompt(5), strategy_slot=grant.strategy_slot, **fields)])
        result = events.admit_results[0]
        if expected is None:
            rejected = (AdmitStatus.REJECTED, Status.RejectCertUnmatched & 0xFFFFFFFF)
            d.equal((result.status, result.reject_code), rejected, f"admit result: {words}")
        else:
            d.equal(result.status, AdmitStatus.ADMITTED, f"admit status: {words}")
            d.equal((result.cert_id, result.granted_class), expected, f"certificate and class: {words}")
            d.retire(1)


@case
def a_certificate_for_grammars(new: New) -> None:
    d = new(certificates={"s": [_cert(2), _cert(1, grammar=True)]})
    sample = d.can.grammar
    need(sample is not None, "no grammars")
    assert sample is not None
    grant = d.engine.strategy_register(_register("s"))
    grammar = d.engine.grammar_create(sample.text)
    admit = d.admit(1, d.prompt(5), strategy_slot=grant.strategy_slot, grammar_handle=grammar)
    result = d.tick(admits=[admit]).admit_results[0]
    d.equal((result.cert_id, result.granted_class), (grant.certificates[1].cert_id, 1), "certificate under a grammar")


@case
def an_unmatched_admit_is_refused_alone(new: New) -> None:
    d = new(certificates={"s": [_cert(1)]})
    slot = d.engine.strategy_register(_register("s")).strategy_slot
    prompt = d.prompt(6)
    whole = d.generate(9, prompt, 2)
    events = d.tick(
        admits=[d.admit(1, prompt, strategy_slot=slot, minimum_exactness=2), d.admit(2, prompt)],
        prefills=[LanePrefill(1, 0, 6), LanePrefill(2, 0, 6)],
        decodes=[LaneDecode(1, 2), LaneDecode(2, 2)],
    )
    statuses = {result.lane_tag: result.status for result in events.admit_results}
    d.equal(statuses, {1: AdmitStatus.REJECTED, 2: AdmitStatus.ADMITTED}, "admit statuses")
    d.same(d.tokens(events, 2), whole, "tokens of the lane beside it")
    d.refused(Status.RejectUnknownLane, "a decode of the lane that was refused", decodes=[LaneDecode(1, 1)])
    d.equal(d.tick(admits=[d.admit(1, prompt)]).admit_results[0].status, AdmitStatus.ADMITTED, "its tag, again")


@case
def slots_that_refuse_the_plan(new: New) -> None:
    d = new(certificates={"s": [_cert(1)]})
    slot = d.engine.strategy_register(_register("s")).strategy_slot
    prompt = d.prompt(6)
    unknown = [d.admit(1, prompt, strategy_slot=slot + 50)]
    d.refused(Status.RejectIllegalCombination, "an unknown slot", admits=unknown)
    host = [d.admit(1, prompt, strategy_slot=slot, sampling=Sampling.HOST, host_sampler_identity=HOST)]
    d.refused(Status.RejectHostRules, "a host lane on a strategy that is not host compatible", admits=host)
    d.start(1, prompt, decode=1)


@case
def a_strategy_changes_no_token(new: New) -> None:
    d = new(certificates={"s": [_cert(2)]})
    slot = d.engine.strategy_register(_register("s")).strategy_slot
    prompt = [1, 2, 3, 4, 9, 9, 2, 3]
    whole = d.generate(1, prompt, 12)
    d.start(1, prompt, strategy_slot=slot)
    events = d.tick(decodes=[LaneDecode(1, 12)])
    spec = d.emit(events, 1).spec
    d.same(d.tokens(events, 1), whole, "tokens with a strategy")
    d.true(spec.cert_id_in_effect > 0, "a certificate in effect")
    d.true(spec.proposed > 0, "something was drafted")
    d.true(spec.accepted <= spec.proposed, f"{spec.accepted} accepted of {spec.proposed}")


# ---- media


def _with_media(new: New) -> tuple[Driver, int, int, linkw.MediaInfo]:
    d = new()
    token = d.can.image_token
    need(token is not None, "no media")
    assert token is not None
    handle, info = d.engine.media_encode("picture.png")
    d.equal(info.image_token_id, token, "the placeholder token")
    return d, token, handle, info


def _picture(d: Driver, token: int, info: linkw.MediaInfo) -> list[int]:
    return [*d.prompt(5), *[token] * info.n_tokens, *d.prompt(5, salt=3)]


@case
def media_is_bound_before_or_after_the_admit(new: New) -> None:
    d, token, handle, info = _with_media(new)
    prompt = _picture(d, token, info)
    d.engine.media_bind(1, handle, 5)
    d.equal(len(d.tokens(d.start(1, prompt, decode=2), 1)), 2, "tokens of a lane bound before its admit")
    d.refuses(Status.UnknownHandle, "a handle that was used up", d.engine.media_release, handle)
    d.refuses(Status.UnknownHandle, "the same, bound", d.engine.media_bind, 2, handle, 5)
    other, _ = d.engine.media_encode("picture.png")
    d.tick(admits=[d.admit(2, prompt)])
    d.engine.media_bind(2, other, 5)
    events = d.tick(prefills=[LanePrefill(2, 0, len(prompt))], decodes=[LaneDecode(2, 2)])
    d.equal(len(d.tokens(events, 2)), 2, "tokens of a lane bound after its admit")
    spare, _ = d.engine.media_encode("picture.png")
    d.engine.media_release(spare)
    d.refuses(Status.UnknownHandle, "a release again", d.engine.media_release, spare)


@case
def placeholders_must_lie_in_one_chunk(new: New) -> None:
    d, token, handle, info = _with_media(new)
    prompt = _picture(d, token, info)
    d.engine.media_bind(1, handle, 5)
    events = d.start(1, prompt, count=7)
    d.status(events, TickStatus.LANE_ERRORS, "with a run that is cut")
    d.equal([(fault.lane_tag, fault.code) for fault in events.faults], [(1, FaultCode.MEDIA)], "faults")
    events = d.start(2, prompt)
    d.equal([(fault.lane_tag, fault.code) for fault in events.faults], [(2, FaultCode.MEDIA)], "nothing bound")
    misplaced, _ = d.engine.media_encode("picture.png")
    d.engine.media_bind(3, misplaced, 4)
    events = d.start(3, prompt)
    d.equal([(fault.lane_tag, fault.code) for fault in events.faults], [(3, FaultCode.MEDIA)], "bound beside the run")
