# shellcheck shell=bash
# For infra/setup.sh: `step LOG TITLE COMMAND...` runs a command with its output in the file LOG. It prints the title, and a dot
# each $dot_s seconds while the command runs. If that fails, the end of the log is shown and the shell exits with 1.

dot_s=3

step() {
  local log=$1 title=$2 dots is_done=true
  shift 2
  printf ' %s' "$title"
  printf '\n== %s, after %s s\n' "$*" "$SECONDS" >> "$log"
  while sleep "$dot_s" && kill -0 $$ 2> /dev/null; do printf '.'; done &
  dots=$!
  "$@" >> "$log" 2>&1 || is_done=false
  kill "$dots"
  wait "$dots" 2> /dev/null || true
  if ! $is_done; then
    printf ': failed; %s says\n' "$log" >&2
    tail -n 40 "$log" >&2
    exit 1
  fi
  printf ','
}
