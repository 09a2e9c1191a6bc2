#!/usr/bin/env bash
# System packages where they are missing and can be installed, then .venv with torch. Called by `make`; quick when nothing is missing.
#   tools/setup.sh PYTHON VENV
set -euo pipefail
python=$1 venv=$2
here=$(cd "$(dirname "$0")" && pwd)

# package -> what shows that it is there
missing=()
need() { "${@:2}" >/dev/null 2>&1 || missing+=("$1"); }
header() { for dir in /usr/include /usr/local/include /usr/include/"$(uname -m)"-linux-gnu; do [ -e "$dir/$1" ] && return 0; done; return 1; }
need g++ command -v c++
need cmake command -v cmake
need ccache command -v ccache
need libgloo-dev header gloo/config.h
need nlohmann-json3-dev header nlohmann/json.hpp
need libgtest-dev header gtest/gtest.h
need libgmock-dev header gmock/gmock.h
need python3-venv "$python" -c "import ensurepip, venv"
need python3-dev "$python" -c "import os, sysconfig; assert os.path.exists(os.path.join(sysconfig.get_paths()['include'], 'Python.h'))"

if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing: ${missing[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
  else
    echo "These packages (Debian's names) are missing and can't be installed from here: ${missing[*]}" >&2
    echo "Install them, as root: apt-get install ${missing[*]}" >&2
    exit 1
  fi
fi

# What only tests of several hosts need (they are skipped without, and say so): never a reason to stop.
missing=()
[ "${UNSHARD_NO_OPTIONAL_PACKAGES:-}" ] || [ "$(id -u)" != 0 ] || {
  need openssh-server test -x /usr/sbin/sshd
  need openssh-client command -v ssh
  need iproute2 command -v ip
}
if [ ${#missing[@]} -gt 0 ] && command -v apt-get >/dev/null; then
  echo "installing, for tests of several hosts: ${missing[*]}"
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"; } >/dev/null ||
    echo "that failed: those tests will be skipped" >&2
fi

wanted=$(cat "$here"/requirements*.txt | cksum)
if [ "$(cat "$venv/.installed" 2>/dev/null)" != "$wanted" ]; then
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  echo "installing torch and the tools into $venv (minutes the first time)"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$here/requirements.txt"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r "$here/requirements-alone.txt"
  echo "$wanted" > "$venv/.installed"
fi
