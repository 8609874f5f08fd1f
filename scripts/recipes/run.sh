#!/bin/sh
# Run a recipe from its raw files, which must be there; nothing but the start's weights is downloaded.
#
#   scripts/recipes/run.sh marco    DOWNLOADS OUTPUT
#   scripts/recipes/run.sh nq       DOWNLOADS OUTPUT
#   scripts/recipes/run.sh triviaqa DOWNLOADS OUTPUT
#
# Further arguments go to `condenser recipe`, such as --encoder FOLDER or --dry_run.
set -eu
here=$(dirname "$0")
[ $# -ge 3 ] || { echo "usage: run.sh marco|nq|triviaqa DOWNLOADS OUTPUT [option ...]" >&2; exit 2; }
name=$1 downloads=$2 output=$3
shift 3

# Print the file FOLDER/NAME, packed or not; end when it is not there.
need() {
    for file in "$downloads/$1" "$downloads/$1.gz"; do
        [ ! -f "$file" ] || { echo "$file"; return; }
    done
    echo "run.sh: error: $downloads/$1 (or .gz) is missing: $2" >&2
    exit 2
}

case $name in
marco)
    from="RocketQA's marco.tar.gz"
    for file in para.txt para.title.txt train.query.txt dev.query.txt qrels.train.tsv qrels.dev.tsv; do
        need "$file" "$from" >/dev/null
    done
    [ -f "$downloads/train.negatives.tsv" ] ||
        need qidpidtriples.train.full.2.tsv "MS MARCO's BM25 negatives" >/dev/null
    collection=$downloads
    ;;
nq | triviaqa)
    short=${name%qa}
    from="DPR's download list, see prepare_dpr.py"
    train=$(need "biencoder-$short-train.json" "$from")
    test=$(need "$short-test.qa.csv" "$from")
    passages=$(need psgs_w100.tsv "$from")
    collection=$output/collection
    python "$here/prepare_dpr.py" --train "$train" --test "$test" --passages "$passages" --output "$collection"
    ;;
*)
    echo "run.sh: error: unknown recipe $name, expected marco, nq or triviaqa" >&2
    exit 2
    ;;
esac
condenser recipe "$here/$name.yaml" --collection "$collection" --output "$output" "$@"
