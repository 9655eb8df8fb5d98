#!/bin/sh
# For test_gpu_check.py: stands for nvcc, make and others. Appends its command line and what variables ask for to
# `calls`. Misbehaves where `trouble` has a folder with that line.
line=$(printf '%s ' "${0##*/}" "$@")
asked=${LAZYLLM_CUDA_ARCHS:+for $LAZYLLM_CUDA_ARCHS}
printf '%s\n' "$line$asked" >>"$FAKES/calls"
for trouble in "$FAKES"/trouble/*; do
    [ "$line" = "$(cat "$trouble/line" 2>/dev/null)" ] || continue
    case $(cat "$trouble/kind") in
    fail) echo 'it broke'; exit 3 ;;
    hang) echo 'so far'; exec sleep 100 ;;
    stubborn) trap '' TERM; sleep 100 & echo $! >"$FAKES/grandchild"; while :; do sleep 100; done ;;
    killed) kill -KILL $$ ;;
    esac
done
case $line in
*query-gpu=compute_cap*) cat "$FAKES/device"; exit ;;
*' -m benchmarks shapes '*)
    while [ "$1" != --out ]; do shift; done
    mkdir -p "$2"
    printf '# A report\n\n## Goals\n\n| goal | verdict |\n\n' >"$2/bench.md"
    printf '## Tables\n\n| no goal |\n' >>"$2/bench.md" ;;
esac
echo "all is well"
