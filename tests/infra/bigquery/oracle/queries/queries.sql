-- Whole queries over the tables people and orders: names, joins, groups, sets and order.
SELECT id, name FROM people ORDER BY id
SELECT * FROM people ORDER BY id LIMIT 3
SELECT * EXCEPT (tags, address, born, seen) FROM people ORDER BY id
SELECT * REPLACE (id * 10 AS id) FROM people WHERE id < 3 ORDER BY 1
SELECT DATE(seen) AS seen, COUNT(*) AS n FROM people GROUP BY seen ORDER BY seen
SELECT UPPER(name) AS name, COUNT(*) AS n FROM people GROUP BY name ORDER BY n, name
SELECT id AS name FROM people ORDER BY name
SELECT name AS team, team AS name FROM people ORDER BY team, name
SELECT id + 1 AS id FROM people WHERE id = 1
SELECT id + 1 AS id FROM people WHERE id > 1 ORDER BY id
SELECT team, SUM(score) AS score FROM people GROUP BY team HAVING SUM(score) > 1 ORDER BY team
SELECT team, COUNT(*) AS id FROM people GROUP BY team ORDER BY id, team
SELECT id AS x FROM people WHERE x > 1
SELECT team AS t FROM people GROUP BY t ORDER BY t
SELECT 1 + id AS k, COUNT(*) FROM people GROUP BY k ORDER BY k
SELECT team FROM people GROUP BY 1 ORDER BY 1
SELECT name FROM people GROUP BY team
SELECT name, COUNT(*) FROM people
SELECT missing FROM people
SELECT p.missing FROM people AS p
SELECT people.id FROM people WHERE people.id = 2
SELECT q.id FROM people AS q WHERE people.id = 2
SELECT COUNT(*), COUNT(score), COUNT(DISTINCT team), COUNT(DISTINCT score) FROM people
SELECT SUM(score), AVG(score), MIN(score), MAX(score) FROM people
SELECT SUM(id), AVG(id), MIN(id), MAX(id) FROM people
SELECT MIN(name), MAX(name), MIN(born), MAX(seen) FROM people
SELECT SUM(id) FROM people WHERE FALSE
SELECT COUNT(*) FROM people WHERE FALSE
SELECT team, COUNT(*) FROM people WHERE FALSE GROUP BY team
SELECT SUM(paid), AVG(paid) FROM orders
SELECT COUNTIF(id > 2), LOGICAL_AND(id > 0), LOGICAL_OR(id > 100) FROM people
SELECT BIT_AND(id), BIT_OR(id), BIT_XOR(id) FROM people
SELECT ARRAY_AGG(name IGNORE NULLS ORDER BY id) FROM people
SELECT ARRAY_AGG(id ORDER BY id DESC LIMIT 2) FROM people
SELECT ARRAY_AGG(DISTINCT team IGNORE NULLS ORDER BY team) FROM people
SELECT STRING_AGG(name, '-' ORDER BY id) FROM people
SELECT STRING_AGG(DISTINCT team, ',' ORDER BY team) FROM people
SELECT STRING_AGG(name, '|' ORDER BY id LIMIT 2) FROM people
SELECT team, ARRAY_AGG(id ORDER BY id) FROM people GROUP BY team ORDER BY team
SELECT ANY_VALUE(name HAVING MAX id) FROM people
SELECT STDDEV(id), STDDEV_POP(id), VARIANCE(id), VAR_POP(id) FROM people
SELECT CORR(id, id * 2), COVAR_POP(id, id), COVAR_SAMP(id, id) FROM people
SELECT SUM(DISTINCT id) FROM people
SELECT AVG(DISTINCT score) FROM people WHERE NOT IS_NAN(score)
SELECT score, COUNT(*) FROM people GROUP BY score ORDER BY score
SELECT DISTINCT score FROM people ORDER BY score
SELECT id FROM people ORDER BY score, id
SELECT id FROM people ORDER BY score DESC, id
SELECT id FROM people ORDER BY name NULLS LAST, id
SELECT id FROM people ORDER BY name DESC NULLS FIRST, id
SELECT id FROM people ORDER BY team, id DESC LIMIT 2 OFFSET 1
SELECT SUM(9223372036854775807) FROM people
SELECT SUM(1e308) FROM people
SELECT p.id, o.item FROM people AS p JOIN orders AS o ON p.id = o.person ORDER BY 1, 2
SELECT p.id, o.item FROM people AS p LEFT JOIN orders AS o ON p.id = o.person ORDER BY 1, 2
SELECT p.id, o.item FROM people AS p RIGHT JOIN orders AS o ON p.id = o.person ORDER BY 1, 2
SELECT p.id, o.item FROM people AS p FULL JOIN orders AS o ON p.id = o.person ORDER BY 1, 2
SELECT id, item FROM (SELECT id FROM people) JOIN (SELECT person AS id, item FROM orders) USING (id) ORDER BY 1, 2
SELECT * FROM (SELECT id FROM people) FULL JOIN (SELECT person AS id, item FROM orders) USING (id) ORDER BY 1, 2
SELECT COUNT(*) FROM people CROSS JOIN orders
SELECT COUNT(*) FROM people, orders WHERE id = person
SELECT a.id, b.id FROM people AS a JOIN people AS b ON a.team = b.team AND a.id < b.id ORDER BY 1, 2
SELECT a.id FROM people AS a JOIN people AS b ON a.score = b.score ORDER BY 1
SELECT id FROM people AS a JOIN people AS b ON TRUE
SELECT name FROM people WHERE id IN (SELECT person FROM orders) ORDER BY name
SELECT name FROM people WHERE id NOT IN (SELECT person FROM orders)
SELECT name FROM people WHERE id NOT IN (SELECT person FROM orders WHERE person IS NOT NULL) ORDER BY name
SELECT name, (SELECT COUNT(*) FROM orders WHERE person = id) AS n FROM people ORDER BY id
SELECT name FROM people AS p WHERE EXISTS (SELECT 1 FROM orders AS o WHERE o.person = p.id) ORDER BY id
SELECT (SELECT item FROM orders)
SELECT (SELECT item FROM orders WHERE person = 100)
SELECT ARRAY(SELECT item FROM orders WHERE person = p.id ORDER BY item) FROM people AS p ORDER BY id
SELECT 1 UNION ALL SELECT 2
SELECT 1 UNION DISTINCT SELECT 1
SELECT 1 UNION ALL SELECT 2.5
SELECT 1 UNION ALL SELECT 'a'
SELECT 1, 2 UNION ALL SELECT 3
SELECT x FROM UNNEST([1, 2, 2, NULL, NULL]) AS x EXCEPT DISTINCT SELECT 1
SELECT x FROM UNNEST([1, 2, NULL]) AS x INTERSECT DISTINCT SELECT x FROM UNNEST([2, NULL, 3]) AS x
SELECT 1 AS a UNION ALL SELECT 2 AS b
(SELECT 1 AS a UNION ALL SELECT 3) UNION ALL SELECT 2 ORDER BY a DESC
SELECT 1 UNION SELECT 2
SELECT NULL UNION ALL SELECT 1
SELECT DATE '2024-01-01' UNION ALL SELECT TIMESTAMP '2024-01-01'
WITH a AS (SELECT 1 AS x), b AS (SELECT x + 1 AS x FROM a) SELECT * FROM a UNION ALL SELECT * FROM b
WITH people AS (SELECT 5 AS id) SELECT id FROM people
WITH a AS (SELECT id FROM people) SELECT COUNT(*) FROM a AS x JOIN a AS y ON x.id = y.id
WITH a AS (SELECT 1 AS x) SELECT * FROM (WITH a AS (SELECT 2 AS x) SELECT * FROM a)
WITH a AS (SELECT x FROM b), b AS (SELECT 1 AS x) SELECT * FROM a
SELECT id, ROW_NUMBER() OVER (ORDER BY id DESC) FROM people ORDER BY id
SELECT id, RANK() OVER (ORDER BY team), DENSE_RANK() OVER (ORDER BY team) FROM people ORDER BY id
SELECT id, SUM(id) OVER (PARTITION BY team ORDER BY id) FROM people ORDER BY id
SELECT id, SUM(id) OVER (ORDER BY id ROWS BETWEEN 1 PRECEDING AND CURRENT ROW) FROM people ORDER BY id
SELECT id, SUM(id) OVER (ORDER BY id RANGE BETWEEN 1 PRECEDING AND 1 FOLLOWING) FROM people ORDER BY id
SELECT id, SUM(id) OVER () FROM people ORDER BY id
SELECT id, COUNT(*) OVER (PARTITION BY team) FROM people ORDER BY id
SELECT id, LAG(id) OVER (ORDER BY id), LEAD(id, 2, -1) OVER (ORDER BY id) FROM people ORDER BY id
SELECT id, FIRST_VALUE(name) OVER (ORDER BY id), LAST_VALUE(name) OVER (ORDER BY id) FROM people ORDER BY id
SELECT id, FIRST_VALUE(name IGNORE NULLS) OVER (ORDER BY id DESC) FROM people ORDER BY id
SELECT id, NTH_VALUE(id, 2) OVER (ORDER BY id) FROM people ORDER BY id
SELECT id, NTILE(3) OVER (ORDER BY id) FROM people ORDER BY id
SELECT id, PERCENT_RANK() OVER (ORDER BY id), CUME_DIST() OVER (ORDER BY id) FROM people ORDER BY id
SELECT id, AVG(score) OVER (PARTITION BY team) FROM people WHERE NOT IS_NAN(score) ORDER BY id
SELECT id, MAX(score) OVER (PARTITION BY team), MIN(score) OVER (PARTITION BY team) FROM people ORDER BY id
SELECT id, ROW_NUMBER() OVER (ORDER BY score, id) FROM people ORDER BY id
SELECT id FROM people QUALIFY ROW_NUMBER() OVER (PARTITION BY team ORDER BY id DESC) = 1 ORDER BY id
SELECT DISTINCT PERCENTILE_CONT(id, 0.5) OVER () FROM people
SELECT DISTINCT PERCENTILE_DISC(id, 0.5) OVER () FROM people
SELECT id, SUM(COUNT(*)) OVER () FROM people GROUP BY id ORDER BY id
SELECT team, SUM(id) AS s, RANK() OVER (ORDER BY SUM(id) DESC) FROM people GROUP BY team ORDER BY team
SELECT id, COUNTIF(id > 2) OVER (ORDER BY id) FROM people ORDER BY id
SELECT SUM(id) OVER w FROM people WINDOW w AS (ORDER BY id) ORDER BY 1
SELECT team, name, COUNT(*) FROM people GROUP BY ROLLUP(team, name) ORDER BY 1, 2, 3
SELECT team, name, COUNT(*) FROM people GROUP BY GROUPING SETS ((team), (name), ()) ORDER BY 1, 2, 3
SELECT team, GROUPING(team), COUNT(*) FROM people GROUP BY ROLLUP(team) ORDER BY 1, 2
SELECT team, name, COUNT(*) FROM people GROUP BY CUBE(team, name) ORDER BY 1, 2, 3
SELECT team, COUNT(*) FROM people GROUP BY ALL ORDER BY 1
SELECT * FROM (SELECT team, id FROM people) PIVOT(SUM(id) FOR team IN ('red', 'blue'))
SELECT * FROM (SELECT 1 AS a, 2 AS b) UNPIVOT(v FOR k IN (a, b)) ORDER BY k
SELECT t FROM people, UNNEST(tags) AS t ORDER BY t
SELECT address.city, COUNT(*) FROM people GROUP BY address.city ORDER BY 1
SELECT address.zip + 1 FROM people ORDER BY 1
SELECT address FROM people ORDER BY id
SELECT ARRAY_LENGTH(tags) FROM people ORDER BY id
SELECT tags[SAFE_OFFSET(0)] FROM people ORDER BY id
SELECT IF(score > 1, 'high', 'low') AS level, COUNT(*) FROM people GROUP BY level ORDER BY level
SELECT EXTRACT(YEAR FROM born) AS y, COUNT(*) FROM people GROUP BY y ORDER BY y
SELECT id FROM people WHERE score = score ORDER BY id
SELECT id FROM people WHERE score != score ORDER BY id
SELECT id FROM people WHERE score > 1 ORDER BY id
SELECT id FROM people WHERE NOT (score > 1) ORDER BY id
SELECT id FROM people WHERE score >= 0 ORDER BY id
SELECT id FROM people WHERE score BETWEEN 0 AND 2 ORDER BY id
SELECT id FROM people WHERE name LIKE '%a%' ORDER BY id
SELECT id FROM people WHERE team = NULL
SELECT id FROM people WHERE id
SELECT id FROM people ORDER BY 2
SELECT id FROM people LIMIT -1
SELECT id, id FROM people ORDER BY 1
FROM people |> WHERE id < 3 |> SELECT id, name |> ORDER BY id
SELECT COUNT(*) FROM (SELECT DISTINCT team, name FROM people)
SELECT AS STRUCT 1 AS a, 'b' AS b
SELECT AS VALUE STRUCT(1 AS a)
SELECT APPROX_COUNT_DISTINCT(team) FROM people
SELECT SAFE.LN(0), SAFE.SUBSTR('abc', 1, -1), SAFE.DATE(2024, 2, 30), SAFE.PARSE_DATE('%Y', 'x')
