-- GoogleSQL functions whose results differ from DuckDB's function of the same name.
-- Loaded into the schema "bq" at start; infra/local/bigquery/googlesql/rewrite.py writes the calls.
-- Overloads are chosen by argument type; a shift is the number of days that moves the wanted first day
-- of a week onto DuckDB's Monday.

CREATE OR REPLACE MACRO bq.divide(a DOUBLE, b DOUBLE) AS
    CASE WHEN b = 0 THEN error('division by zero') ELSE a / b END,
  (a DECIMAL(38, 9), b DECIMAL(38, 9)) AS
    CASE WHEN b = 0 THEN error('division by zero') ELSE CAST(a / b AS DECIMAL(38, 9)) END;

CREATE OR REPLACE MACRO bq.safe_divide(a DOUBLE, b DOUBLE) AS
    CASE WHEN b = 0 THEN NULL ELSE a / b END,
  (a DECIMAL(38, 9), b DECIMAL(38, 9)) AS CASE WHEN b = 0 THEN NULL ELSE CAST(a / b AS DECIMAL(38, 9)) END;

CREATE OR REPLACE MACRO bq.div(a BIGINT, b BIGINT) AS
    CASE WHEN b = 0 THEN error('division by zero') ELSE a // b END;

CREATE OR REPLACE MACRO bq.mod(a BIGINT, b BIGINT) AS
    CASE WHEN b = 0 THEN error('division by zero') ELSE a % b END;

CREATE OR REPLACE MACRO bq.sum(v BIGINT) AS CAST(sum(v) AS BIGINT),
  (v DOUBLE) AS sum(v),
  (v DECIMAL(38, 9)) AS CAST(sum(v) AS DECIMAL(38, 9));

CREATE OR REPLACE MACRO bq.avg(v DOUBLE) AS avg(v),
  (v DECIMAL(38, 9)) AS CAST(avg(v) AS DECIMAL(38, 9));

-- ROUND and its kind give a FLOAT64 for an INT64.
CREATE OR REPLACE MACRO bq.inexact(v DOUBLE) AS v, (v DECIMAL(38, 9)) AS v;

CREATE OR REPLACE MACRO bq.sign(v BIGINT) AS CAST(sign(v) AS BIGINT), (v DOUBLE) AS CAST(sign(v) AS DOUBLE);

CREATE OR REPLACE MACRO bq.string(v VARCHAR) AS v,
  (v BOOLEAN) AS CAST(v AS VARCHAR),
  (v BIGINT) AS CAST(v AS VARCHAR),
  (v DOUBLE) AS CASE
      WHEN isnan(v) THEN 'NaN'
      WHEN isinf(v) THEN CASE WHEN v > 0 THEN 'inf' ELSE '-inf' END
      WHEN v = trunc(v) AND abs(v) < 1e15 THEN CAST(CAST(v AS BIGINT) AS VARCHAR)
      ELSE regexp_replace(CAST(v AS VARCHAR), '\.0$', '') END,
  (v DECIMAL(38, 9)) AS regexp_replace(CAST(v AS VARCHAR), '\.?0+$', ''),
  (v BLOB) AS decode(v),
  (v DATE) AS CAST(v AS VARCHAR),
  (v TIME) AS CAST(v AS VARCHAR),
  (v TIMESTAMP) AS CAST(v AS VARCHAR),
  (v TIMESTAMPTZ) AS CAST(v AS VARCHAR),
  (v UUID) AS CAST(v AS VARCHAR);

CREATE OR REPLACE MACRO bq.int64(v BIGINT) AS v,
  (v BOOLEAN) AS CAST(v AS BIGINT),
  (v DOUBLE) AS CAST(round(v) AS BIGINT),
  (v DECIMAL(38, 9)) AS CAST(round(v, 0) AS BIGINT),
  (v VARCHAR) AS CASE WHEN regexp_full_match(v, '\s*[-+]?[0-9]+\s*') THEN CAST(v AS BIGINT)
      WHEN v IS NOT NULL THEN error('Bad int64 value: ' || v) END;

CREATE OR REPLACE MACRO bq.safe_int64(v BIGINT) AS v,
  (v BOOLEAN) AS CAST(v AS BIGINT),
  (v DOUBLE) AS TRY_CAST(round(v) AS BIGINT),
  (v DECIMAL(38, 9)) AS TRY_CAST(round(v, 0) AS BIGINT),
  (v VARCHAR) AS CASE WHEN regexp_full_match(v, '\s*[-+]?[0-9]+\s*') THEN TRY_CAST(v AS BIGINT) END;

CREATE OR REPLACE MACRO bq.bool(v BOOLEAN) AS v,
  (v BIGINT) AS v <> 0,
  (v VARCHAR) AS CASE lower(v) WHEN 'true' THEN true WHEN 'false' THEN false
      ELSE CASE WHEN v IS NOT NULL THEN error('Bad bool value: ' || v) END END;

CREATE OR REPLACE MACRO bq.safe_bool(v BOOLEAN) AS v,
  (v BIGINT) AS v <> 0,
  (v VARCHAR) AS CASE lower(v) WHEN 'true' THEN true WHEN 'false' THEN false END;

CREATE OR REPLACE MACRO bq.bytes(v BLOB) AS v, (v VARCHAR) AS encode(v);

CREATE OR REPLACE MACRO bq.at(list, position) AS CASE
    WHEN position < 1 OR position > len(list)
      THEN error('Array index ' || (position - 1) || ' is out of bounds')
    ELSE list_extract(list, position) END;

CREATE OR REPLACE MACRO bq.safe_at(list, position) AS
    CASE WHEN position >= 1 THEN list_extract(list, position) END;

CREATE OR REPLACE MACRO bq.substr(v VARCHAR, position BIGINT) AS
    CASE WHEN position < 0 THEN substring(v, greatest(len(v) + position + 1, 1))
      ELSE substring(v, greatest(position, 1)) END,
  (v VARCHAR, position BIGINT, size BIGINT) AS CASE
    WHEN size < 0 THEN error('Third argument in SUBSTR() cannot be negative')
    WHEN position < 0 THEN substring(v, greatest(len(v) + position + 1, 1), size)
    ELSE substring(v, greatest(position, 1), size) END;

CREATE OR REPLACE MACRO bq.date_trunc(unit, v DATE, shift) AS
    CAST(date_trunc(unit, v + to_days(shift)) - to_days(shift) AS DATE),
  (unit, v TIMESTAMP, shift) AS date_trunc(unit, v + to_days(shift)) - to_days(shift),
  (unit, v TIMESTAMPTZ, shift) AS date_trunc(unit, v + to_days(shift)) - to_days(shift);

CREATE OR REPLACE MACRO bq.timestamp_trunc_at(unit, v TIMESTAMPTZ, shift, zone) AS
    timezone(zone, date_trunc(unit, timezone(zone, v) + to_days(shift)) - to_days(shift));

CREATE OR REPLACE MACRO bq.date_plus(v DATE, span INTERVAL) AS CAST(v + span AS DATE),
  (v TIMESTAMP, span INTERVAL) AS v + span,
  (v TIMESTAMPTZ, span INTERVAL) AS v + span,
  (v TIME, span INTERVAL) AS v + span;

CREATE OR REPLACE MACRO bq.date_minus(v DATE, span INTERVAL) AS CAST(v - span AS DATE),
  (v TIMESTAMP, span INTERVAL) AS v - span,
  (v TIMESTAMPTZ, span INTERVAL) AS v - span,
  (v TIME, span INTERVAL) AS v - span;

-- DATE_DIFF and DATETIME_DIFF count the boundaries between two moments, TIMESTAMP_DIFF the whole units.
-- Cut to the unit first, as DuckDB counts whole weeks.
CREATE OR REPLACE MACRO bq.date_diff(unit, later DATE, earlier DATE, shift) AS
    date_diff(unit, date_trunc(unit, earlier + to_days(shift)), date_trunc(unit, later + to_days(shift))),
  (unit, later TIMESTAMP, earlier TIMESTAMP, shift) AS
    date_diff(unit, date_trunc(unit, earlier + to_days(shift)), date_trunc(unit, later + to_days(shift))),
  (unit, later TIMESTAMPTZ, earlier TIMESTAMPTZ, shift) AS
    date_diff(unit, date_trunc(unit, earlier + to_days(shift)), date_trunc(unit, later + to_days(shift)));

CREATE OR REPLACE MACRO bq.timestamp_diff(unit_us, later TIMESTAMPTZ, earlier TIMESTAMPTZ) AS
    (epoch_us(later) - epoch_us(earlier)) // unit_us,
  (unit_us, later TIMESTAMP, earlier TIMESTAMP) AS
    (epoch_us(later) - epoch_us(earlier)) // unit_us;

CREATE OR REPLACE MACRO bq.timestamp(v TIMESTAMPTZ) AS v,
  (v DATE) AS CAST(v AS TIMESTAMPTZ),
  (v TIMESTAMP) AS CAST(v AS TIMESTAMPTZ),
  (v VARCHAR) AS CAST(v AS TIMESTAMPTZ);

CREATE OR REPLACE MACRO bq.timestamp_at(v DATE, zone) AS timezone(zone, CAST(v AS TIMESTAMP)),
  (v TIMESTAMP, zone) AS timezone(zone, v),
  (v VARCHAR, zone) AS timezone(zone, CAST(v AS TIMESTAMP));

CREATE OR REPLACE MACRO bq.from_micros(v BIGINT) AS CAST(make_timestamp(v) AS TIMESTAMPTZ);

-- floor(), as the casts to seconds round to the earlier second before 1970 too.
CREATE OR REPLACE MACRO bq.unix(v TIMESTAMPTZ, unit_us) AS
    CAST((epoch_us(v) - ((epoch_us(v) % unit_us) + unit_us) % unit_us) // unit_us AS BIGINT);
