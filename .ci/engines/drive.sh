# What the scripts that drive a real engine have in common; sourced by them, with `root` the clone.

python="${KVSAN_PYTHON:-python3}"

# engine_environment FOLDER PACKAGE...: a fresh environment with a CPU torch and, without what their own metadata asks
# for, the packages given; nothing where the folder has one.
engine_environment() {
    local folder="$1"
    shift
    if [ ! -x "$folder/bin/python" ]; then
        "$python" -m venv "$folder"
        "$folder/bin/pip" install --quiet "torch==2.13.0"
        "$folder/bin/pip" install --quiet --no-deps "$@"
    fi
}

# engine_campaigns ALLOCATOR...: a campaign of ENGINE_SECONDS (default: 60) each. 1: a campaign found faults of the
# engine that docs/findings.md does not know; more is a failure of kvsan.
engine_campaigns() {
    local status=0
    for allocator in "$@"; do
        "$python" -m kvsan fuzz --allocator "$allocator" --time "${ENGINE_SECONDS:-60}" \
            --cases kvsan-engine-cases || status=$?
    done
    return "$status"
}
