"""The manifests for Kubernetes: against schemas, and against the flags of the launch.

Validation is strict: an unknown field is an error. The rules that the API server and
JobSet check beyond their schemas (CEL, webhooks) are not evaluated here.
"""

import copy
import functools
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from mjax.cli import flags
from mjax.config import command_line
from mjax.launch import __main__ as command
from mjax.launch import client
from mjax.launch.config import RestartConfig
from mjax.launch.policy import EXIT_CODES
from mjax.processes.config import split_address
from mjax.recipes import RECIPES
from tests.shell_commands import check_fits

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
VERSION = "1.37"
FREE_KEYS = ("labels", "annotations", "matchLabels", "limits", "requests")
"""Below these keys any key is allowed."""
JOBSET_LABELS = ("jobset-name", "replicatedjob-name")
"""Labels that JobSet adds to each pod, below jobset.sigs.k8s.io/."""

Manifest = dict[str, Any]


def read(name: str) -> list[Manifest]:
    documents: Any = yaml.safe_load_all((FOLDER / name).read_text())
    return list(documents)


KUSTOMIZATION = read("kustomization.yaml")[0]
FILES = [path.name for path in sorted(FOLDER.glob("*.yaml"))]
DOCUMENTS = [
    (f"{name}/{one['kind']}", one)
    for name in FILES
    if name != "kustomization.yaml"
    for one in read(name)
]
JOBSET = next(one for _, one in DOCUMENTS if one["kind"] == "JobSet")


# It reads half a megabyte of definitions at each call.
kubernetes_validate.utils.schema_contents = functools.cache(
    kubernetes_validate.utils.schema_contents
)


def closed(schema: Any) -> Any:
    """Return a schema that refuses the fields it does not name."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(one) for key, one in schema.items()}
    if isinstance(schema.get("properties"), dict) and "type" in schema:
        found["additionalProperties"] = False
    return found


JOBSET_SCHEMA = closed(
    yaml.safe_load((Path(__file__).parent / "jobset_schema.yaml").read_text())
)


def validate(one: Manifest) -> None:
    """Raise if the API would refuse a manifest."""
    if one["kind"] != "JobSet":
        kubernetes_validate.validate(one, VERSION, strict=True)
        return
    jsonschema.Draft202012Validator(JOBSET_SCHEMA).validate(one)
    for part in one["spec"]["replicatedJobs"]:
        job = {"apiVersion": "batch/v1", "kind": "Job", **part["template"]}
        kubernetes_validate.validate(
            job | {"metadata": one["metadata"]}, VERSION, strict=True
        )


def refuses(one: Manifest) -> bool:
    try:
        validate(one)
    except (jsonschema.ValidationError, KeyError):
        return True
    except kubernetes_validate.utils.SchemaNotFoundError:
        return True
    return False


def places(value: Any, path: tuple[Any, ...] = ()):
    """Yield the path of every key in a manifest whose name is not free."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield (*path, key)
            if key not in FREE_KEYS:
                yield from places(below, (*path, key))
    elif isinstance(value, list):
        for index, below in enumerate(value):
            yield from places(below, (*path, index))


def parent(one: Manifest, path: tuple[Any, ...]) -> Any:
    found: Any = one
    for key in path[:-1]:
        found = found[key]
    return found


by_document = pytest.mark.parametrize(
    ("name", "one"), DOCUMENTS, ids=[name for name, _ in DOCUMENTS]
)


@by_document
def test_each_manifest_has_only_fields_that_the_api_knows(name, one):
    validate(one)


@by_document
def test_every_misspelled_field_is_caught(name, one):
    paths = list(places(one))
    assert len(paths) >= 5
    passed = []
    for path in paths:
        wrong = copy.deepcopy(one)
        above = parent(wrong, path)
        above[f"{path[-1]}s"] = above.pop(path[-1])
        if not refuses(wrong):
            passed.append(path)
    assert passed == []


@by_document
def test_every_field_of_a_wrong_type_is_caught(name, one):
    """A list of a list is not a valid value of any field here."""
    passed = []
    for path in places(one):
        if path in (("apiVersion",), ("kind",)):  # they name the schema
            continue
        wrong = copy.deepcopy(one)
        parent(wrong, path)[path[-1]] = [[[]]]
        if not refuses(wrong):
            passed.append(path)
    assert passed == []


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("JobSet", ("spec", "replicatedJobs", 0, "name")),
        ("JobSet", ("spec", "successPolicy", "operator")),
        ("JobSet", ("spec", "coordinator", "replicatedJob")),
        ("JobSet", ("spec", "replicatedJobs", 1, "template", "spec", "template")),
        ("Role", ("rules", 0, "verbs")),
        ("RoleBinding", ("roleRef",)),
        ("ClusterRoleBinding", ("subjects", 0, "kind")),
    ],
)
def test_a_field_that_is_missing_is_caught(kind, path):
    wrong = copy.deepcopy(next(one for _, one in DOCUMENTS if one["kind"] == kind))
    del parent(wrong, path)[path[-1]]
    assert refuses(wrong)


# ------------------------------------------------- what the manifests and the flags say

PARTS = {part["name"]: part for part in JOBSET["spec"]["replicatedJobs"]}


def job(part: str) -> Manifest:
    return PARTS[part]["template"]["spec"]


def pod(part: str) -> Manifest:
    return job(part)["template"]["spec"]


def container(part: str) -> Manifest:
    (found,) = pod(part)["containers"]
    assert found["name"] == part
    return found


def fields_of_a_pod(part: str) -> dict[str, str]:
    """Variables of the downward API."""
    name = JOBSET["metadata"]["name"]
    labels = "metadata.labels['jobset.sigs.k8s.io/jobset-name']"
    coordinator = JOBSET["spec"]["coordinator"]["replicatedJob"]
    endpoint = "metadata.annotations['jobset.sigs.k8s.io/coordinator']"
    return {
        "metadata.name": f"{name}-{part}-0-3-x7k2p",
        "metadata.namespace": KUSTOMIZATION["namespace"],
        "metadata.uid": "8f0c",
        "status.podIP": "10.1.2.3",
        labels: name,
        endpoint: f"{name}-{coordinator}-0-0.{name}",
    }


def words(part: str) -> list[str]:
    """Return the words that a container runs, as a kubelet expands them."""
    one = container(part)
    known = {
        variable["name"]: variable.get("value")
        or fields_of_a_pod(part)[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        for variable in one.get("env", [])
    }
    found = [
        re.sub(r"\$\((\w+)\)", lambda match: known[match[1]], word)
        for word in [*one["command"], *one["args"]]
    ]
    if found[0] == "sh":
        script, name = found[2:4]
        assert name == "sh"
        return [*shlex.split(script.partition(' "$@"; exit $?')[0]), *found[4:]]
    return found


def driver_flags() -> tuple[command.DriverFlags, list[str]]:
    start = ["python", "-m", "mjax.launch", "driver"]
    assert words("driver")[:4] == start
    own, train = command._split(words("driver")[4:])
    cls = command.DriverFlags
    return flags.read(cls, own, prog="driver"), train


def agent_flags() -> command.AgentFlags:
    assert words("agent")[:4] == ["python", "-m", "mjax.launch", "agent"]
    cls = command.AgentFlags
    return flags.read(cls, words("agent")[4:], prog="agent")


def mounts(one: Manifest) -> dict[str, str]:
    return {mount["mountPath"]: mount["name"] for mount in one["volumeMounts"]}


def test_the_command_lines_are_read_by_launch_and_trainer_and_fit_the_gpus():
    config, train = driver_flags()
    assert agent_flags().host == fields_of_a_pod("agent")["metadata.name"]
    assert agent_flags().address == "10.1.2.3"
    checked, work_dir = command._train_flags(train)
    check_fits(
        command_line.parse(checked, RECIPES, "train")[0],
        config.hosts,
        container("agent")["resources"]["limits"]["nvidia.com/gpu"],
    )
    assert str(work_dir).startswith("/runs/")
    assert config.kubernetes.namespace == KUSTOMIZATION["namespace"]


def test_what_stands_in_a_comment_to_be_switched_on_is_read_too():
    text = (FOLDER / "jobset.yaml").read_text()
    assert "# - --kubernetes.cordon " in text
    own, _ = command._split(words("driver")[4:])
    cls = command.DriverFlags
    more = [*own, "--kubernetes.cordon"]
    assert flags.read(cls, more, prog="driver").kubernetes.cordon
    assert "# - cordon.yaml" in (FOLDER / "kustomization.yaml").read_text()


def test_there_is_an_agent_for_each_host_and_spare():
    config, _ = driver_flags()
    agents = config.hosts + config.spares
    assert job("agent")["completions"] == job("agent")["parallelism"] == agents
    assert job("driver")["completions"] == job("driver")["parallelism"] == 1
    assert {part["replicas"] for part in PARTS.values()} == {1}


def test_the_agents_call_where_the_driver_listens():
    config, _ = driver_flags()
    host, port = split_address(agent_flags().driver, "--driver")
    name = JOBSET["metadata"]["name"]
    assert (host, port) == (f"{name}-driver-0-0.{name}", 7070)
    assert split_address(config.bind, "--bind") == ("0.0.0.0", port)
    assert [one["containerPort"] for one in container("driver")["ports"]] == [port]
    network = JOBSET["spec"]["network"]
    assert network == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}


def test_the_driver_watches_the_pods_that_jobset_labels_as_agents():
    config, _ = driver_flags()
    assert config.kubernetes.selector is not None
    selector = dict(pair.split("=") for pair in config.kubernetes.selector.split(","))
    values = (JOBSET["metadata"]["name"], "agent")
    names = [f"jobset.sigs.k8s.io/{label}" for label in JOBSET_LABELS]
    assert selector == dict(zip(names, values, strict=True))
    given = {one["name"]: one["valueFrom"] for one in container("agent")["env"][:3]}
    uid = {"fieldRef": {"fieldPath": "metadata.uid"}}
    assert given["POD_UID"] == uid  # without it no pod is deleted


@pytest.mark.parametrize("part", ["driver", "agent"])
def test_each_mount_has_a_volume_and_each_volume_a_mount(part):
    one = pod(part)
    volumes = [volume["name"] for volume in one["volumes"]]
    containers = one["containers"] + one["initContainers"]
    mounted = {name for each in containers for name in mounts(each).values()}
    assert mounted == set(volumes)
    assert len(volumes) == len(set(volumes))
    (claim,) = [
        v["persistentVolumeClaim"] for v in one["volumes"] if v["name"] == "work"
    ]
    found = next(one for _, one in DOCUMENTS if "Claim" in one["kind"])
    assert claim["claimName"] == found["metadata"]["name"]
    assert found["spec"]["accessModes"] == ["ReadWriteMany"]


@pytest.mark.parametrize("part", ["driver", "agent"])
def test_the_token_is_a_file_that_the_launch_reads(part, tmp_path):
    """With fsGroup the mode of a mounted Secret is refused; that of the copy is not."""
    config = driver_flags()[0] if part == "driver" else agent_flags()
    (copies,) = pod(part)["initContainers"]
    *install, source, target = copies["command"]
    assert Path(target) == config.token_file
    assert mounts(copies)[str(Path(source).parent)] == "secret"
    assert mounts(container(part))[str(Path(target).parent)] == "token"
    assert "secret" not in mounts(container(part)).values()
    secret = tmp_path / "secret"
    secret.write_text("word\n")
    volume = next(v for v in pod(part)["volumes"] if v["name"] == "secret")
    assert "fsGroup" in pod(part)["securityContext"]
    secret.chmod(volume["secret"]["defaultMode"])
    with pytest.raises(ValueError, match="others may read it"):
        client.read_token(secret)
    subprocess.run([*install, secret, tmp_path / "token"], check=True)
    assert client.read_token(tmp_path / "token") == "word"


def test_the_driver_may_do_what_it_does_and_no_more():
    """`tests/launch/fake_kubernetes.py` also supports no other request."""
    documents = {one["kind"]: one for _, one in DOCUMENTS}
    account = documents["ServiceAccount"]["metadata"]["name"]
    assert pod("driver")["serviceAccountName"] == account
    assert pod("driver")["automountServiceAccountToken"]
    assert not pod("agent")["automountServiceAccountToken"]
    assert "serviceAccountName" not in pod("agent")
    for role, binding, resource, verbs in (
        ("Role", "RoleBinding", "pods", ["list", "watch", "delete"]),
        ("ClusterRole", "ClusterRoleBinding", "nodes", ["get", "patch"]),
    ):
        (rule,) = documents[role]["rules"]
        expected = {"apiGroups": [""], "resources": [resource], "verbs": verbs}
        assert rule == expected
        to = documents[binding]["roleRef"]
        assert (to["kind"], to["name"]) == (role, documents[role]["metadata"]["name"])
        (subject,) = documents[binding]["subjects"]
        assert (subject["name"], subject["namespace"]) == (
            account,
            KUSTOMIZATION["namespace"],
        )


def test_what_ends_the_run_ends_the_jobset_and_what_kills_the_driver_does_not():
    rules = job("driver")["podFailurePolicy"]["rules"]
    (ends,) = [rule["onExitCodes"] for rule in rules if rule["action"] == "FailJob"]
    codes = sorted({code for code in EXIT_CODES.values() if code})
    assert (ends["containerName"], ends["operator"]) == ("driver", "In")
    assert ends["values"] == codes
    assert pod("driver")["restartPolicy"] == "Never"  # as podFailurePolicy demands
    assert job("driver")["podReplacementPolicy"] == "Failed"  # and one journal
    assert JOBSET["spec"]["successPolicy"]["targetReplicatedJobs"] == ["driver"]
    assert JOBSET["spec"]["failurePolicy"] == {"maxRestarts": 0}


def test_the_shell_of_the_driver_hands_on_flags_and_exit_code():
    script = container("driver")["command"][2]
    script = script.replace("python -m mjax.launch driver", "check")
    check = 'check() { [ "$#" = 2 ] && [ "$2" = "b c" ] && return 93; }; '
    done = subprocess.run(["sh", "-c", check + script, "sh", "--a", "b c"], check=False)
    assert done.returncode == 93


def test_an_agent_comes_back_and_has_the_time_to_save():
    restart = RestartConfig()
    grace_s = pod("agent")["terminationGracePeriodSeconds"]
    assert grace_s >= restart.stop_s + restart.kill_s
    assert pod("agent")["restartPolicy"] == "OnFailure"
    assert job("agent")["backoffLimit"] == 2**31 - 1
    rule = pod("agent")["affinity"]["podAntiAffinity"]
    (one,) = rule["requiredDuringSchedulingIgnoredDuringExecution"]
    labels = job("agent")["template"]["metadata"]["labels"]
    assert one["labelSelector"]["matchLabels"] == labels
    assert one["topologyKey"] == "kubernetes.io/hostname"
    assert labels != job("driver")["template"]["metadata"]["labels"]


def test_gpus_are_a_limit_of_the_agents_and_tolerated():
    assert container("agent")["resources"]["limits"]["nvidia.com/gpu"] > 0
    assert "nvidia.com/gpu" not in container("driver")["resources"]["limits"]
    keys = [one["key"] for one in pod("agent")["tolerations"]]
    assert "nvidia.com/gpu" in keys


def test_kustomize_names_files_that_exist_and_the_image_of_all_containers():
    expected = {"apiVersion", "kind", "namespace", "images", "resources"}
    assert KUSTOMIZATION.keys() == expected
    assert {*KUSTOMIZATION["resources"], "cordon.yaml", "kustomization.yaml"} == {
        *FILES
    }
    images = {
        one["image"]
        for part in PARTS
        for one in pod(part)["containers"] + pod(part)["initContainers"]
    }
    assert images == {one["name"] for one in KUSTOMIZATION["images"]}


def test_what_the_page_tells_to_run_exists():
    """Names of the manifests and commands of the launch in the how-to page."""
    text = (ROOT / "docs" / "launch_kubernetes.md").read_text()
    work_dir = command._train_flags(driver_flags()[1])[1]
    lines = [line for line in text.splitlines() if "-- python -m mjax.launch" in line]
    assert len(lines) >= 2
    for line in lines:
        inner = shlex.split(
            line.partition("-- python -m mjax.launch ")[2], comments=True
        )
        cls = {"status": command.RunFlags, "stop": command.RunFlags}.get(
            inner[0], command.EvictFlags
        )
        asked = flags.read(cls, inner[1:], prog="x")
        assert asked.work_dir == work_dir
        assert asked.token_file == driver_flags()[0].token_file
        assert f"job/{JOBSET['metadata']['name']}-driver-0" in line
    secret = pod("driver")["volumes"][0]["secret"]["secretName"]
    assert f"create secret generic {secret} --from-literal=token=" in text
    assert "tested on Kubernetes" not in text
