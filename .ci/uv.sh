# Sourced by the install scripts, from the repository's root: gets uv and defines `install PYTHON ARGUMENT...` and
# `install_locked PYTHON LOCK [ARGUMENT...]`.
# One cache serves all venvs of the checkout: a package is downloaded and unpacked once, and linked into each.
# Where uv cannot be had, pip does the same, slower.

uv_home=$PWD/.ci/venv-uv
export UV_CACHE_DIR=$uv_home/cache UV_HTTP_TIMEOUT=300 UV_PYTHON_DOWNLOADS=never UV_NO_PROGRESS=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# uv does not read pip's configuration: where packages come from is told to it.
_pip_setting() { "$uv_home/bin/python" -m pip config get "$1" 2>/dev/null; }
_get_uv() {
    [ -x "$uv_home/bin/uv" ] || { python3 -m venv "$uv_home" && "$uv_home/bin/python" -m pip install --quiet --require-hashes --requirement .ci/locks/uv.txt; } || return 1
    local default links
    default=$(_pip_setting global.index-url) && export UV_DEFAULT_INDEX=$default
    more_indexes=$(_pip_setting global.extra-index-url)
    links=${PIP_FIND_LINKS:-$(_pip_setting global.find-links)} && [ -n "$links" ] && export UV_FIND_LINKS=$links
    return 0
}
uv=$uv_home/bin/uv more_indexes=
_get_uv >/dev/null || uv=

# install PYTHON ARGUMENT...: as `pip install ARGUMENT...` into the interpreter's environment.
install() {
    local python=$1
    shift
    if [ -n "$uv" ]; then "$uv" pip install --quiet --python "$python" "$@"; else "$python" -m pip install --quiet "$@"; fi
}

# A package of the same name in a second index must not take the place of the one that is meant. Therefore other indexes than
# the default one are asked only where hashes decide, and for torch, whose builds have an index of their own.

# install_locked PYTHON LOCK [ARGUMENT...]: install what .ci/locks/LOCK.txt lists; every file must have one of its hashes.
install_locked() {
    local python=$1 lock=$2 strategy=()
    shift 2
    [ -z "$more_indexes" ] || local -x UV_INDEX=$more_indexes
    [ -z "$uv" ] || strategy=(--index-strategy unsafe-best-match)
    install "$python" "${strategy[@]}" --no-deps --require-hashes --requirement ".ci/locks/$lock.txt" "$@"
}

# install_this PYTHON: install this checkout, with its published names as `accelerate`, built by what is there, and the torch that the constraints name. Which build of
# torch it is depends on the machine, so its hash is in no lock.
install_this() {
    [ -z "$more_indexes" ] || local -x UV_INDEX=$more_indexes
    install "$1" --constraint .ci/constraints.txt torch && install "$1" --no-deps --no-build-isolation --editable . --editable dropin
}

# install_newest PYTHON REQUIREMENTS: install this checkout and the newest releases of packages, for the night: no lock has them.
install_newest() {
    [ -z "$more_indexes" ] || local -x UV_INDEX=$more_indexes
    install "$1" --constraint .ci/constraints.txt torch &&
        install "$1" --constraint .ci/constraints.txt --upgrade --editable . --editable dropin --requirement "$2"
}
