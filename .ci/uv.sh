# Sourced by the install scripts, from the repository's root: gets uv and defines `install PYTHON ARGUMENT...`.
# One cache serves all venvs of the checkout: a package is downloaded and unpacked once, and linked into each.
# Where uv cannot be had, pip does the same, slower.

uv_home=$PWD/.ci/venv-uv
export UV_CACHE_DIR=$uv_home/cache UV_HTTP_TIMEOUT=300 UV_PYTHON_DOWNLOADS=never UV_NO_PROGRESS=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# uv does not read pip's configuration: where packages come from is told to it.
_pip_setting() { "$uv_home/bin/python" -m pip config get "$1" 2>/dev/null; }
_get_uv() {
    [ -x "$uv_home/bin/uv" ] || { python3 -m venv "$uv_home" && "$uv_home/bin/python" -m pip install --quiet uv==0.13.7; } || return 1
    local default more links
    default=$(_pip_setting global.index-url) && export UV_DEFAULT_INDEX=$default
    more=$(_pip_setting global.extra-index-url) && export UV_INDEX=$more UV_INDEX_STRATEGY=unsafe-best-match
    links=${PIP_FIND_LINKS:-$(_pip_setting global.find-links)} && [ -n "$links" ] && export UV_FIND_LINKS=$links
    return 0
}
uv=$uv_home/bin/uv
_get_uv >/dev/null || uv=

# install PYTHON ARGUMENT...: as `pip install ARGUMENT...` into the interpreter's environment.
install() {
    local python=$1
    shift
    if [ -n "$uv" ]; then "$uv" pip install --quiet --python "$python" "$@"; else "$python" -m pip install --quiet "$@"; fi
}
