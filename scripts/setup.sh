#!/usr/bin/env bash
# Everything that building, testing and the demo need: system packages, a virtual environment in
# .venv, PyTorch, the Python tools. Safe to run again; with nothing to do it takes a fraction of a
# second.
#
#   MOK_PYTHON=python3.12   the Python that .venv is made from (3.10 or newer; default: python3)
#   MOK_TORCH_SPEC=...      what pip installs as PyTorch (default: torch==2.13.0, else torch>=2.10)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
say() { printf 'setup: %s\n' "$*"; }
die() {
  printf 'setup: %s\n' "$@" >&2
  exit 1
}

# ---- system packages -------------------------------------------------------------------------

system_packages() {
  local packages=(g++ make cmake ninja-build libgtest-dev libcli11-dev nlohmann-json3-dev libhwy-dev
    libxxhash-dev)
  local python=${MOK_PYTHON:-python3}
  if [[ ! -x $venv/bin/python ]] && ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    packages+=(python3 python3-venv)
  fi

  if ! command -v dpkg-query >/dev/null; then
    local tool
    for tool in g++ cmake ninja "$python"; do
      command -v "$tool" >/dev/null || die "'$tool' is missing." \
        "This is no Debian or Ubuntu, so please install its counterparts of: ${packages[*]}"
    done
    return
  fi

  local missing=() package installed
  installed=$(dpkg-query -W -f '${Package} ${db:Status-Status}\n' "${packages[@]}" 2>/dev/null || true)
  for package in "${packages[@]}"; do
    grep -qxF "$package installed" <<<"$installed" || missing+=("$package")
  done
  # A tool that was installed by other means counts too.
  local kept=()
  for package in "${missing[@]}"; do
    case $package in
      g++ | make | cmake) command -v "$package" >/dev/null && continue ;;
      ninja-build) command -v ninja >/dev/null && continue ;;
    esac
    kept+=("$package")
  done
  [[ ${#kept[@]} -eq 0 ]] && return

  if [[ $(id -u) -ne 0 ]]; then
    die "system packages are missing. Please type this, then the same command as before:" \
      "  sudo apt-get update && sudo apt-get install -y --no-install-recommends ${kept[*]}"
  fi
  say "installing ${kept[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends "${kept[@]}" >/dev/null
}

check_cmake() {
  local version
  version=$(cmake --version | sed -n '1s/.* //p')
  if [[ $(printf '%s\n' 3.25 "$version" | sort -V | head -n1) != 3.25 ]]; then
    die "CMake 3.25 or newer is needed, this is $version (a newer one: pip install cmake)"
  fi
}

# ---- Python ----------------------------------------------------------------------------------

has_torch() { # PYTHON: a PyTorch >= 2.10 that it can import?
  "$1" - 2>/dev/null <<'PY'
import re, torch
major, minor = map(int, re.match(r"(\d+)\.(\d+)", torch.__version__).groups())
raise SystemExit((major, minor) < (2, 10))
PY
}

make_venv() {
  local python=${MOK_PYTHON:-python3}
  [[ -x $venv/bin/python ]] && "$venv/bin/python" -m pip --version >/dev/null 2>&1 && return
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "Python 3.10 or newer is needed, '$python' is $("$python" -V 2>&1) (choose with MOK_PYTHON=...)"
  local options=()
  if has_torch "$python"; then
    say "using the PyTorch of $(command -v "$python")"
    options=(--system-site-packages)
  fi
  say "making .venv with $("$python" -V)"
  rm -rf "$venv"
  "$python" -m venv "${options[@]}" "$venv"
}

install_torch() {
  has_torch "$venv/bin/python" && return
  if [[ -n ${MOK_TORCH_SPEC:-} ]]; then
    say "installing $MOK_TORCH_SPEC"
    pip_install "$MOK_TORCH_SPEC"
    return
  fi
  say "installing PyTorch (a CPU build is enough; where pip is not told of one, it takes the usual"
  say "build, on x86-64 with CUDA: some GB. To choose: install torch>=2.10 into .venv beforehand.)"
  pip_install torch==2.13.0 || pip_install 'torch>=2.10'
}

pip_install() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

python_packages() {
  make_venv
  local stamp=$venv/.mok-setup state
  state=$(cat "$root"/scripts/setup.sh "$root"/requirements/*.txt "$venv/pyvenv.cfg" | cksum)
  state+=" $root ${MOK_TORCH_SPEC:-}"
  [[ -f $stamp && $(<"$stamp") == "$state" ]] && return

  install_torch
  say "installing the Python packages of requirements/dev.txt"
  pip_install -r "$root/requirements/dev.txt"
  # 'import mok' finds the tree's package.
  local site
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  printf '%s\n' "$root/python" >"$site/mok-tree.pth"
  printf '%s' "$state" >"$stamp"
  say "done: $("$venv/bin/python" -c 'import sys, torch; print("Python", sys.version.split()[0], "PyTorch", torch.__version__)')"
}

mkdir -p "$root/build"
if command -v flock >/dev/null; then # two at a time: the second waits, then finds all done
  exec 9>"$root/build/.setup-lock"
  flock 9
fi
system_packages
check_cmake
python_packages
