"""Dry runs of a launch on GKE, and shells in its pods."""

import shlex
from collections.abc import Sequence
from typing import Any

from lmwright.cloud.gke.check import NEEDED
from lmwright.cloud.gke.cluster import Cluster
from lmwright.cloud.gke.manifest import GROUP, PLURAL, VERSION, job_set
from lmwright.cloud.spec import Offer, Spec
from lmwright.cloud.tunnel import Tunnel, run_until_interrupted
from lmwright.errors import UserError
from lmwright.guard.urls import redact_text


def describe_calls(spec: Spec, code: str) -> list[str]:
    """Every call that launching would make of the cluster, with the JobSets, as YAML."""
    assert spec.cloud is not None and spec.cloud.gke is not None
    gke = spec.cloud.gke
    jobsets = f"/apis/{GROUP}/{VERSION}/namespaces/{gke.namespace}/{PLURAL}"
    verbs = ", ".join(f"{verb} {resource}" for verb, _, resource in NEEDED)
    lines = [
        f"# would ask cluster {gke.context} for /apis/{GROUP}/{VERSION}, namespace "
        f"{gke.namespace}, nodes, what the manifest names, and whether it allows: {verbs}",
    ]
    for number, offer in enumerate(spec.offers, 1):
        id = f"{spec.name}-{number}"
        metadata = {"lmwright-job": spec.url, "lmwright-code": f"{code}/HASH"}
        manifest = job_set(spec.cloud, id, spec.name, offer, metadata)
        lines.append(f"# {'would call' if number == 1 else 'or else'} POST {jobsets}")
        lines.append("---" if number > 1 else "")
        lines.append(redact_text(dump_yaml(manifest)).rstrip())
    return lines


def dump_yaml(manifest: dict[str, Any]) -> str:
    """A manifest as YAML, with texts of several lines as blocks."""
    import yaml  # comes with the client

    class Dumper(yaml.SafeDumper):
        """YAML dumper that writes blocks, and no references."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: Any, data: str) -> Any:
        style = "|" if "\n" in data else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", data, style=style)

    Dumper.add_representer(str, text)
    return yaml.dump(manifest, Dumper=Dumper, sort_keys=False, width=100)


def shell(
    spec: Spec, id: str, offer: Offer, host: int, words: Sequence[str], tunnel: Tunnel | None
) -> int:
    """Opens a shell in the pod of a host by kubectl, or runs a command there, or opens a tunnel;
    returns its exit code."""
    if tunnel and words:
        raise UserError("--tunnel: kubectl does one thing at a time; run the command apart from it")
    assert spec.cloud is not None and spec.cloud.gke is not None
    gke = spec.cloud.gke
    pod = Cluster(spec.cloud, spec.url).pods(id).get(divmod(host, offer.hosts_per_slice))
    if pod is None:
        raise UserError(f"--host: {host} has no pod now; see: lmwright jobs show {spec.name}")
    name = pod.metadata.name
    command = ["kubectl", "--context", gke.context, "--namespace", gke.namespace]
    if tunnel:
        command += ["port-forward", name, f"{tunnel.here}:{tunnel.there}"]
    else:
        command += ["exec", *([] if words else ["-it"]), name, "--"]
        command += ["sh", "-c", shlex.join(words)] if words else ["sh"]
    try:
        return run_until_interrupted(command, tunnel, host)
    except FileNotFoundError:
        raise UserError("kubectl, which reaches the pods, is not installed") from None
