SELECT "offset", emitted_id AS token FROM decisions
WHERE run = {run} AND target = {target} AND emitted_id IS NOT NULL
    AND "offset" > (SELECT max("offset") - {prompts} FROM prompts WHERE run = {run})
ORDER BY "offset", position
