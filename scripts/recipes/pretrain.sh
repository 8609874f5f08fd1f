#!/bin/bash
# Pretrain by a published recipe from its raw files, which must be there; only weights are downloaded.
#
#   scripts/recipes/pretrain.sh condenser-wiki    DOWNLOADS OUTPUT
#   scripts/recipes/pretrain.sh cocondenser-wiki  DOWNLOADS OUTPUT --init CONDENSER/model
#   scripts/recipes/pretrain.sh cocondenser-marco DOWNLOADS OUTPUT --init CONDENSER/model
#
# Makes OUTPUT/spans and OUTPUT/model. Further arguments go to `condenser pretrain`. In the environment:
#   LAUNCH     what starts the processes: "torchrun --nproc_per_node 8 --no-python"; "true" builds the spans alone
#   TOKENIZER  folder or hub name (bert-base-uncased)
set -euo pipefail
here=$(dirname "$0")
[ $# -ge 3 ] || {
    echo "usage: pretrain.sh condenser-wiki|cocondenser-wiki|cocondenser-marco DOWNLOADS OUTPUT [option ...]" >&2
    exit 2
}
name=$1 downloads=$2 output=$3
shift 3

# Objects with id, url, title and text, one a line: the files of WikiExtractor put together.
wikipedia="Wikipedia, made by WikiExtractor --json"

# Print the file DOWNLOADS/NAME, packed or not; end when it is not there.
need() {
    for file in "$downloads/$1" "$downloads/$1.gz"; do
        [ ! -f "$file" ] || { echo "$file"; return; }
    done
    echo "pretrain.sh: error: $downloads/$1 (or .gz) is missing: $2" >&2
    exit 2
}

# Cut the given files into spans of at most $1 tokens.
spans() {
    length=$1
    shift
    condenser spans --input "$@" --tokenizer "${TOKENIZER:-bert-base-uncased}" --max_length "$length" \
        --short_spans 0.1 --output "$output/spans"
}

case $name in
condenser-wiki)
    wiki=$(need wiki.jsonl "$wikipedia")
    first=$(need books_large_p1.txt "BookCorpus, a sentence a line")
    second=$(need books_large_p2.txt "BookCorpus, a sentence a line")
    books=$output/books.txt.gz
    if [ ! -f "$books" ]; then
        mkdir -p "$output"
        # A sentence is no span: 64 in a row make a document.
        gzip -cdf "$first" "$second" | awk '{ printf "%s%s", $0, NR % 64 ? " " : "\n" } END { print "" }' |
            gzip -1n >"$books.partial"
        mv "$books.partial" "$books"
    fi
    spans 128 "$wiki" "$books"
    ;;
cocondenser-wiki)
    wiki=$(need wiki.jsonl "$wikipedia")
    spans 128 "$wiki"
    ;;
cocondenser-marco)
    raw=$(need msmarco-docs.tsv "MS MARCO's documents: id, url, title, body")
    documents=$output/documents.tsv.gz
    if [ ! -f "$documents" ]; then
        mkdir -p "$output"
        gzip -cdf "$raw" | cut -f 1,3,4 | gzip -1n >"$documents.partial"
        mv "$documents.partial" "$documents"
    fi
    # Its author later advised spans about as long as the passages that will be searched.
    spans 80 "$documents"
    ;;
*)
    echo "pretrain.sh: error: unknown recipe $name, expected condenser-wiki, cocondenser-wiki or cocondenser-marco" >&2
    exit 2
    ;;
esac
${LAUNCH:-} condenser pretrain --config "$here/$name.yaml" --data "$output/spans" --output "$output/model" "$@"
