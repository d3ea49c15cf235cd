-- Views and a macro on top of the tables. They may read a run that is still being written.

-- Bytes as text: valid UTF-8 unchanged, each invalid sequence as U+FFFD (one per maximal subpart, as the Unicode
-- standard recommends and Python does). A token often has only a part of a character, so `decode` alone would fail.
CREATE MACRO text_of(bytes) AS coalesce(
    try(decode(bytes)),
    array_to_string(
        list_transform(
            regexp_extract_all(
                hex(bytes),
                -- whole characters of 1 to 4 bytes, then beginnings of one, then any byte
                '[0-7].|C[2-9A-F][89AB].|D.[89AB].'
                || '|E0[AB].[89AB].|E[1-9ABCEF][89AB].[89AB].|ED[89].[89AB].'
                || '|F0[9AB].[89AB].[89AB].|F[123][89AB].[89AB].[89AB].|F48.[89AB].[89AB].'
                || '|E0[AB].|E[1-9ABCEF][89AB].|ED[89].'
                || '|F0[9AB].[89AB].|F[123][89AB].[89AB].|F48.[89AB].|F0[9AB].|F[123][89AB].|F48.'
                || '|..'
            ),
            lambda part: coalesce(try(decode(unhex(part))), chr(65533))
        ),
        ''
    )
);

CREATE VIEW tokens AS
SELECT
    run,
    dataset,
    prompt_id,
    "offset",
    position,
    emitted_id AS token_id,
    text_of(emitted_bytes) AS text,
    origin
FROM decisions
WHERE emitted_id IS NOT NULL
ORDER BY run, "offset", position;
